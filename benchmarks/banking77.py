"""The methods on Banking77: learning rate by validation on one seed after a few rounds, then three seeds, beside both
baselines (local-only and centralized training, as many passes).

    python benchmarks/banking77.py --data PATH/banking77 --out runs/banking77

Each run is a folder under ``--out``; what is there already is not run again, so the script can be stopped at any
moment. ``--page`` writes the table. Runs go through two single-thread processes by default (``--workers``).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METHODS = ("fedavg", "fedit", "ffa-lora", "rolora", "flora", "fedsa-lora", "fedloru")
BASELINES = ("centralized", "local-only")
RATES = (2e-3, 8e-3, 2e-2)
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Trial:
    """One run: a method or baseline, a learning rate, a seed, a number of rounds."""

    method: str
    lr: float
    seed: int
    rounds: int

    @property
    def folder(self) -> str:
        return f"{self.method}-lr{self.lr:g}-seed{self.seed}-rounds{self.rounds}"


def build_config(trial: Trial, args: argparse.Namespace) -> dict[str, Any]:
    """The trial's config, as a user would write it."""
    return {
        "seed": trial.seed,
        "threads": 1,
        "model": {"name": args.model, "target_modules": ["query", "value"], "dtype": args.dtype},
        "data": {
            "train": str(args.data / "train.csv"),
            "test": str(args.data / "test.csv"),
            "label": "category",
            **({"first_labels": args.labels} if args.labels else {}),
        },
        "partition": {"partitioner": "dirichlet", "alpha": 0.5, "clients": 10},
        "method": {"name": "fedit" if trial.method in BASELINES else trial.method, "r": 8, "lora_alpha": 16}
        | ({"tau": args.tau} if trial.method == "fedloru" else {}),
        "federation": {"rounds": trial.rounds},
        "training": {"lr": trial.lr, "batch_size": args.batch},
    }


def run_trial(work: tuple[Trial, argparse.Namespace]) -> tuple[Trial, float]:
    """Run one trial if its report is not there yet."""
    trial, args = work
    from fedspan.config import parse_config
    from fedspan.errors import FedspanError
    from fedspan.runs.baselines import train_baseline
    from fedspan.runs.callbacks import Listener
    from fedspan.runs.setup import prepare
    from fedspan.runs.start import run

    folder = args.out / trial.folder
    report = folder / "report.json"
    began = time.monotonic()
    if not report.exists():
        config = parse_config(build_config(trial, args))
        try:
            if trial.method in BASELINES:
                train_baseline(prepare(config), trial.method, Listener(), folder)
            elif (folder / "config.yaml").exists():
                run(None, folder, resume=True)
            else:
                run(config, folder)
        except FedspanError as error:  # a learning rate at which the loss is lost: it counts as the worst
            folder.mkdir(parents=True, exist_ok=True)
            report.write_text(json.dumps({"failed": str(error)}))
    return trial, time.monotonic() - began


def run_trials(trials: list[Trial], args: argparse.Namespace) -> None:
    """All trials, in ``args.workers`` processes."""
    missing = [trial for trial in trials if not (args.out / trial.folder / "report.json").exists()]
    context = multiprocessing.get_context("spawn")
    with context.Pool(args.workers, maxtasksperchild=1) as pool:
        work = [(trial, args) for trial in missing]
        for number, (trial, seconds) in enumerate(pool.imap_unordered(run_trial, work), 1):
            print(f"{number}/{len(missing)} {trial.folder} {seconds:.0f} s", flush=True)


def report_of(trial: Trial, args: argparse.Namespace) -> dict[str, Any]:
    """A finished trial's report."""
    return json.loads((args.out / trial.folder / "report.json").read_text())


def select_rate(method: str, args: argparse.Namespace) -> float:
    """The learning rate with the best validation accuracy on the first seed."""

    if len(args.rates) == 1:
        return args.rates[0]

    def score(lr: float) -> float:
        report = report_of(Trial(method, lr, args.seeds[0], args.sweep_rounds), args)
        return -1.0 if "failed" in report else report["scores"]["validation"]["accuracy"]

    return max(args.rates, key=score)


def summarize_cell(method: str, args: argparse.Namespace) -> dict[str, Any]:
    """Means and standard deviations over the seeds at the chosen rate."""
    import numpy as np

    lr = select_rate(method, args)
    reports = [report_of(Trial(method, lr, seed, args.rounds), args) for seed in args.seeds]

    def stat(*path: str) -> tuple[float, float]:
        values = []
        for report in reports:
            value: Any = report["scores"]
            for key in path:
                value = value[key]
            values.append(float(value))
        return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0

    return {
        "method": method,
        "lr": lr,
        "test": stat("test", "accuracy"),
        "f1": stat("test", "macro_f1"),
        "clients": stat("clients", "accuracy"),
        "worst": stat("clients", "worst", "accuracy"),
        "best_round": [report["best_round"] for report in reports],
        "megabytes": [sum(report["bytes"].values()) / 1e6 if "bytes" in report else None for report in reports],
    }


def page(rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """The table, with the command, the machine and the date."""
    import torch

    def percent(pair: tuple[float, float]) -> str:
        return f"{100 * pair[0]:.1f} ± {100 * pair[1]:.1f}" if len(args.seeds) > 1 else f"{100 * pair[0]:.1f}"

    rates, seeds = " ".join(f"{rate:g}" for rate in args.rates), " ".join(map(str, args.seeds))
    lines = [
        f"Command: `python benchmarks/banking77.py --data PATH/banking77 --labels {args.labels} --rounds {args.rounds} "
        f"--sweep-rounds {args.sweep_rounds} --rates {rates} --seeds {seeds} --batch {args.batch} --tau {args.tau} "
        f"--dtype {args.dtype}`  ",
        f"Date: {time.strftime('%Y-%m-%d')}. Machine: {platform.machine()}, {multiprocessing.cpu_count()} cores, "
        f"torch {torch.__version__}.",
        "",
        "| method | lr | test accuracy % | test macro-F1 % | own test parts: mean % | worst client % | best round "
        "| MB in all |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for entry in rows:
        sizes = [size for size in entry["megabytes"] if size is not None]
        cells = [
            entry["method"],
            f"{entry['lr']:g}",
            *(percent(entry[key]) for key in ("test", "f1", "clients", "worst")),
            ", ".join(map(str, entry["best_round"])),
            f"{sum(sizes) / len(sizes):.1f}" if sizes else "0",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def tabulate_differences(args: argparse.Namespace) -> str:
    """Test accuracy minus that of centralized training under the same seed, in points."""
    import numpy as np

    def accuracy(method: str) -> Any:
        rate = select_rate(method, args)
        reports = [report_of(Trial(method, rate, seed, args.rounds), args) for seed in args.seeds]
        return 100 * np.array([report["scores"]["test"]["accuracy"] for report in reports])

    lines = [
        "| method | " + " | ".join(f"seed {seed}" for seed in args.seeds) + " | mean ± standard error |",
        "|---|" + "---|" * (len(args.seeds) + 1),
    ]
    for method in args.methods:
        if method != "centralized":
            apart = accuracy(method) - accuracy("centralized")
            error = apart.std(ddof=1) / len(apart) ** 0.5
            cells = [*(f"{value:+.1f}" for value in apart), f"{apart.mean():+.1f} ± {error:.1f}"]
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def tabulate_sweep(args: argparse.Namespace) -> str:
    """Validation accuracy of every rate after the sweep's rounds, on the first seed."""
    lines = [
        "| method | " + " | ".join(f"lr {rate:g}" for rate in args.rates) + " |",
        "|---|" + "---|" * len(args.rates),
    ]
    for method in args.methods:
        cells: list[str] = []
        for rate in args.rates:
            report = report_of(Trial(method, rate, args.seeds[0], args.sweep_rounds), args)
            accuracy = None if "failed" in report else report["scores"]["validation"]["accuracy"]
            cells.append("failed" if accuracy is None else f"{100 * accuracy:.1f}")
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Sweep, seeds, table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with Banking77's train.csv and test.csv")
    parser.add_argument("--out", type=Path, default=Path("runs/banking77"))
    parser.add_argument("--model", default="builtin:all-minilm-l6-v2")
    parser.add_argument("--methods", nargs="+", default=[*METHODS, *BASELINES])
    parser.add_argument("--labels", type=int, default=20, help="first labels by name; 0: all")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tau", type=int, default=4, help="FedLoRU's rounds between accumulations")
    parser.add_argument("--dtype", default="bfloat16", help="of the frozen base; factors are float32")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--sweep-rounds", type=int, default=3, help="rounds after which the rates are compared")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--page", type=Path, help="write the table to this file")
    args = parser.parse_args()
    sweep = [Trial(method, lr, args.seeds[0], args.sweep_rounds) for method in args.methods for lr in args.rates]
    run_trials(sweep if len(args.rates) > 1 else [], args)
    chosen = {method: select_rate(method, args) for method in args.methods}
    print("learning rates:", chosen, flush=True)
    run_trials(
        [Trial(method, chosen[method], seed, args.rounds) for seed in args.seeds for method in args.methods], args
    )
    table = page([summarize_cell(method, args) for method in args.methods], args)
    if len(args.seeds) > 1 and "centralized" in args.methods:
        table += f"\nTest accuracy minus centralized training's, in points:\n\n{tabulate_differences(args)}"
    if len(args.rates) > 1:
        table += (
            f"\nValidation accuracy % after {args.sweep_rounds} rounds, seed {args.seeds[0]}:\n\n{tabulate_sweep(args)}"
        )
    print(table)
    if args.page:
        args.page.write_text(table)


if __name__ == "__main__":
    main()
