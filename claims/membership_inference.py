"""Can one tell from a federated adapter who was in its training data? With DP-SGD and without.

``python claims/membership_inference.py --data PATH/banking77``. The attack is that of Yeom et al.: an example whose
loss is below a threshold is called a member. Members are the training examples of all clients, the others are as
many that nobody trained on; the threshold is the one that serves the attacker best.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import report
from matplotlib.figure import Figure
from sklearn.metrics import roc_auc_score, roc_curve

from fedspan.config import parse_config
from fedspan.experiments.intervals import compare_pairs, estimate_standard_error
from fedspan.runs.setup import Prepared, prepare
from fedspan.training.accounting import PrivacySpend

PAPER = (
    "Yeom et al., Privacy Risk in Machine Learning: Analyzing the Connection to Overfitting (CSF 2018, "
    "arXiv:1709.01604), section 3; the bound: Humphries et al., arXiv:2010.12112, theorem 1"
)
DELTA = 1e-4
CLIENTS, BATCH = 5, 16


def draw_members(folder: Path, out: Path, count: int, seed: int) -> tuple[Path, Path]:
    """So many members, and as many others, from one shuffled file: both are drawn alike."""
    with (folder / "train.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    random.Random(seed).shuffle(rows)
    if 2 * count > len(rows):
        raise SystemExit(f"--examples {count}: at most {len(rows) // 2}")
    paths = out / f"members-{seed}.csv", out / f"others-{seed}.csv"
    for path, part in zip(paths, (rows[:count], rows[count : 2 * count]), strict=True):
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["text", "label"], extrasaction="ignore")
            writer.writeheader()
            writer.writerows({"text": row["text"], "label": row.get("label") or row["category"]} for row in part)
    return paths


def build(args: argparse.Namespace, paths: tuple[Path, Path], seed: int, epsilon: float | None) -> Prepared:
    """The run of a seed and a budget; None: without privacy."""
    values: dict[str, Any] = {
        "seed": seed,
        "model": {
            "name": args.model,
            "target_modules": ["query", "value"],
            "layers_to_transform": args.layers,
            "max_length": 48,
        },
        "data": {"train": str(paths[0]), "test": str(paths[1]), "labels": args.labels},
        "partition": {"partitioner": "iid", "clients": CLIENTS, "validation": 0.0, "test": 0.0},
        "method": {"name": "fedit", "r": 8, "lora_alpha": 16},
        "federation": {"rounds": args.rounds},
        "training": {"lr": args.lr, "batch_size": BATCH, "max_grad_norm": 1.0},
    }
    if epsilon is not None:
        values["privacy"] = {"mechanism": "dp-sgd", "epsilon": epsilon, "delta": DELTA, "clip": args.clip}
    return prepare(parse_config(values))


def losses(run: Prepared, examples: Any, progress: Any) -> tuple[np.ndarray, float]:
    """Of every example under the global model, and the accuracy."""
    method, state = run.federation.method, progress.state
    run.engine.adapted.set_base(state.base)
    job = method.start(method.sync(state, None), None, {}, state.round)
    indices = np.arange(len(examples))
    predictions = run.engine.predict(job, examples, indices, 64)
    values = [
        run.task.compute_metrics(predictions[index : index + 1], examples, [index])["loss"]
        for index in range(len(examples))
    ]
    return np.array(values), run.task.compute_metrics(predictions, examples, indices.tolist())["accuracy"]


def attack_model(run: Prepared) -> dict[str, float]:
    """Train; what the attack finds, and what was spent."""
    progress, spend = run.federation.begin(), PrivacySpend(DELTA, "rdp")
    for _ in range(run.federation.settings.rounds):
        result = run.federation.run_round(progress)
        progress = result.progress
        spend.charge(result.charges)
    members, fitted = losses(run, run.train, progress)
    others, accuracy = losses(run, run.test, progress)
    truth = np.concatenate([np.ones(len(members)), np.zeros(len(others))])
    scores = -np.concatenate([members, others])
    false, true, _ = roc_curve(truth, scores)
    return {
        "auc": 100 * float(roc_auc_score(truth, scores)),
        "advantage": 100 * float((true - false).max()),
        "accuracy": 100 * accuracy,
        "fitted": 100 * fitted,
        "epsilon": spend.compute_worst(),
    }


def bound(epsilon: float) -> float:
    """The largest advantage, in points, that any attack has against (epsilon, delta)-privacy of an example."""
    return 100 * (math.exp(epsilon) - 1 + 2 * DELTA) / (math.exp(epsilon) + 1)


def compute_chance_advantage(count: int) -> float:
    """The advantage, in points, of the best threshold on losses that tell nothing: its 95th percentile."""
    rng = np.random.default_rng(0)
    truth = np.repeat([1, 0], count)
    advantages: list[float] = []
    for _ in range(400):
        false, true, _ = roc_curve(truth, rng.random(2 * count))
        advantages.append(float((true - false).max()))
    return 100 * float(np.quantile(advantages, 0.95))


def build_findings(results: Mapping[str, Sequence[dict[str, float]]], budgets: Sequence[float]) -> list[report.Finding]:
    """Paired by seed."""
    none = [one["auc"] for one in results["none"]]
    known = compare_pairs(none, [50.0] * len(none))
    made = [
        report.Finding(
            "Without privacy, members have smaller losses: the attack's AUC is above 50 %",
            f"{sum(none) / len(none):.1f} %, by {known} points",
            known.verdict,
        )
    ]
    for budget in budgets:
        budget_results = results[f"{budget:g}"]
        less = compare_pairs(none, [one["auc"] for one in budget_results])
        made.append(
            report.Finding(
                f"DP-SGD with epsilon {budget:g} lowers the attack's AUC",
                f"{sum(one['auc'] for one in budget_results) / len(budget_results):.1f} %, lower by {less} points",
                less.verdict,
            )
        )
        most = max(one["advantage"] for one in budget_results)
        limit = bound(budget)
        made.append(
            report.Finding(
                f"With epsilon {budget:g} no attack's advantage exceeds {limit:.1f} points",
                f"at most {most:.1f} points in {len(budget_results)} seeds",
                "holds" if most <= limit else "contradicted",
            )
        )
    return made


def draw_figure(results: Mapping[str, Sequence[dict[str, float]]]) -> Figure:
    """AUC and accuracy by budget."""
    figure = Figure(figsize=(6, 3.2))
    axes = figure.subplots()
    names = list(results)
    for key, mark, label in (("auc", "o", "attack's AUC"), ("accuracy", "s", "accuracy on unseen examples")):
        means = [float(np.mean([one[key] for one in results[name]])) for name in names]
        errors = [estimate_standard_error([one[key] for one in results[name]]) for name in names]
        errors = [0.0 if math.isinf(error) else error for error in errors]
        axes.errorbar(range(len(names)), means, yerr=errors, marker=mark, capsize=3, label=label)
    axes.axhline(50, color="0.6", linestyle=":", label="an attack that knows nothing")
    axes.set_xticks(range(len(names)), [name if name == "none" else f"epsilon {name}" for name in names])
    axes.set_ylabel("%")
    axes.legend(frameon=False, fontsize=8)
    return figure


def main() -> None:
    """Train, attack, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with Banking77's train.csv")
    parser.add_argument("--examples", type=int, default=400, help="members, and as many others")
    parser.add_argument("--model", default="builtin:all-minilm-l6-v2")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 5])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--clip", type=float, default=0.5)
    parser.add_argument("--budgets", type=float, nargs="*", default=[8.0, 1.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=report.FOLDER)
    args = parser.parse_args()
    with (args.data / "train.csv").open(newline="", encoding="utf-8") as file:
        args.labels = sorted({row.get("label") or row["category"] for row in csv.DictReader(file)})
    settings = {"none": None, **{f"{budget:g}": budget for budget in args.budgets}}
    results: dict[str, list[dict[str, float]]] = {name: [] for name in settings}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as out:
        for seed in args.seeds:
            paths = draw_members(args.data, Path(out), args.examples, seed)
            for name, epsilon in settings.items():
                results[name].append(attack_model(build(args, paths, seed, epsilon)))
                summary = ", ".join(f"{key} {value:.3g}" for key, value in results[name][-1].items())
                print(f"seed {seed}, epsilon {name}: {summary}", flush=True)
    minutes = (time.perf_counter() - start) / 60
    args.out.mkdir(parents=True, exist_ok=True)
    header = ("epsilon", "spent", "attack's AUC, %", "advantage, points", "accuracy on members, %", "on others, %")
    rows = []
    for name, budget_rows in results.items():
        cells = [
            f"{np.mean([one[key] for one in budget_rows]):.1f}" for key in ("auc", "advantage", "fitted", "accuracy")
        ]
        spent = "no bound" if name == "none" else f"{max(one['epsilon'] for one in budget_rows):.2f}"
        rows.append((name, spent, *cells))
    figure = report.save_figure(
        draw_figure(results), args.out, "membership_inference", "The attack's AUC and the accuracy by privacy budget"
    )
    setup = f"layers {' and '.join(map(str, args.layers))} of {Path(args.model).name}"
    setting = (
        f"Banking77, {args.examples} members over {CLIENTS} clients, as many others from the same file; FedIT of rank 8"
        f" on query and value of {setup}, {args.rounds} rounds of one epoch, AdamW at {args.lr:g}, batches of {BATCH}, "
        f"clipping at {args.clip:g}, delta {DELTA:g}; {len(args.seeds)} seeds, {minutes:.0f} minutes. A threshold on "
        f"losses that tell nothing has an advantage of up to {compute_chance_advantage(args.examples):.1f} points here "
        "(95 % of draws): the best threshold is chosen after the fact."
    )
    title = "Membership inference, with and without DP-SGD"
    made = build_findings(results, args.budgets)
    report.write(
        args.out, "membership_inference", title, PAPER, made, [setting, report.format_table(header, rows), figure]
    )


if __name__ == "__main__":
    main()
