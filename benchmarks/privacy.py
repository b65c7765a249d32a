"""Methods under differential privacy: RoLoRA, FFA-LoRA, FedASK, LA-LoRA and FedSVD at the same epsilon.

    python benchmarks/privacy.py --task sst2 --data PATH/glue/SST-2 --page docs/results/privacy.md
    python benchmarks/privacy.py --task banking77 --data PATH/banking77 --rounds 40 --clients 4

DP-SGD on every client; the noise is the smallest with which all rounds stay within epsilon. All methods train the same
clients from the same seeds at each of the given learning rates, and the rate is selected on validation examples; this
selection is not counted in epsilon. ``--work`` keeps the runs, and what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

METHODS = ("rolora", "ffa-lora", "fedask", "la-lora", "fedsvd")
TASKS: Mapping[str, Mapping[str, Any]] = {
    "sst2": {"train": "train.tsv", "test": "dev.tsv", "text": "sentence", "label": "label"},
    "banking77": {"train": "train.csv", "test": "test.csv", "text": "text", "label": "category", "first_labels": 20},
}
NAMES = {"sst2": "SST-2", "banking77": "Banking77's first 20 intents"}
DELTA = 1e-5

Cell = tuple[str, float, int]
"""Method, epsilon (0: no privacy) and seed."""


def build_config(cell: Cell, lr: float, args: argparse.Namespace) -> dict[str, Any]:
    """Build the config of a run, as a user would write it."""
    method, epsilon, seed = cell
    task = TASKS[args.task]
    values: dict[str, Any] = {
        "seed": seed,
        "threads": 1,
        "model": {"name": args.model, "target_modules": ["query", "value"]},
        "data": {**task, "train": str(args.data / task["train"]), "test": str(args.data / task["test"])},
        "partition": {"partitioner": "iid", "clients": args.clients},
        "method": {"name": method, "r": 8, "lora_alpha": 16},
        "federation": {"rounds": args.rounds, "early_stopping": None},
        "training": {"lr": lr, "batch_size": args.batch_size, "local_steps": args.steps},
        "evaluation": {"every": args.rounds},
    }
    if epsilon:
        values["privacy"] = {"mechanism": "dp-sgd", "epsilon": epsilon, "delta": DELTA, "clip": args.clip}
    return values


def run_cell(cell: Cell, lr: float, args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Return the report of a run, which is done if it is not there yet."""
    from fedspan.config import parse_config
    from fedspan.runs.session import run

    method, epsilon, seed = cell
    folder = work / f"{args.task}-{method}-epsilon{epsilon:g}-lr{lr:g}-seed{seed}"
    if not (folder / "report.json").exists():
        began = time.process_time()
        run(parse_config(build_config(cell, lr, args)), folder, resume=(folder / "config.yaml").exists())
        print(f"{folder.name}: {time.process_time() - began:.0f} processor seconds", flush=True)
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))


def select_rate(cell: Cell, args: argparse.Namespace, work: Path) -> tuple[float, dict[str, Any]]:
    """Return the learning rate with the best validation accuracy, the smaller one of equals, and its report."""
    reports = {lr: run_cell(cell, lr, args, work) for lr in sorted(args.rates)}
    best = max(reports, key=lambda lr: (reports[lr]["scores"]["validation"]["accuracy"], -lr))
    return best, reports[best]


def format_page(selected: Mapping[Cell, tuple[float, dict[str, Any]]], args: argparse.Namespace) -> str:
    """Format the page, with the command, the machine and the date."""
    import torch

    def describe(method: str, epsilon: float) -> str:
        cells = [selected[method, epsilon, seed] for seed in args.seeds]
        scores = np.array([100 * report["scores"]["test"]["accuracy"] for _, report in cells])
        spread = f" ± {scores.std(ddof=1):.1f}" if len(scores) > 1 else ""
        return f"{scores.mean():.1f}{spread} ({', '.join(f'{lr:g}' for lr in sorted({lr for lr, _ in cells}))})"

    def count_megabytes(method: str) -> str:
        sizes = [sum(selected[method, args.epsilons[0], seed][1]["bytes"].values()) for seed in args.seeds]
        return f"{np.mean(sizes) / 1e6:.2f}"

    options = {"clients": args.clients, "rounds": args.rounds, "steps": args.steps, "batch-size": args.batch_size}
    options_text = " ".join(f"--{name} {value}" for name, value in options.items())
    lists = {"epsilons": args.epsilons, "rates": args.rates, "seeds": args.seeds}
    lists_text = " ".join(f"--{name} {' '.join(f'{value:g}' for value in values)}" for name, values in lists.items())
    if args.methods != list(METHODS):
        lists_text += f" --methods {' '.join(args.methods)}"
    heads = ["without privacy" if not epsilon else f"ε = {epsilon:g}" for epsilon in args.epsilons]
    lines = [
        "# Methods under differential privacy",
        "",
        f"This page compares methods under DP-SGD at the same ε, on {NAMES[args.task]}.",
        "",
        f"Command: `python benchmarks/privacy.py --task {args.task} --data PATH {options_text} --clip {args.clip:g} "
        f"{lists_text}`  ",
        f"Date: {time.strftime('%Y-%m-%d')}. Machine: {platform.machine()}, {os.cpu_count()} cores, "
        f"torch {torch.__version__}, 1 thread.",
        "",
        f"{args.model.removeprefix('builtin:')}, rank 8 on query and value, {args.clients} clients of equal "
        f"distribution, {args.rounds} rounds of {args.steps} steps with batches of {args.batch_size} on average; δ = "
        f"{DELTA:g}, gradients of single examples clipped to {args.clip:g}, AdamW, a random head that trains and is "
        "averaged. Held-out accuracy in % after the last round, with the learning rate selected on validation examples "
        f"in brackets; {len(args.seeds)} {'seed' if len(args.seeds) == 1 else 'seeds'}. Megabytes are those of all "
        "messages of a run, headers included.",
        "",
        f"| method | {' | '.join(heads)} | MB |",
        f"|{'---|' * (len(heads) + 2)}",
        *(
            f"| {method} | {' | '.join(describe(method, one) for one in args.epsilons)} | {count_megabytes(method)} |"
            for method in args.methods
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the cells and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder with the task's files")
    parser.add_argument("--model", default="builtin:all-minilm-l6-v2")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 3.0, 8.0], help="0: without privacy")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10, help="local steps in a round")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-3, 8e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--work", type=Path, help="folder for the runs; default: a temporary one")
    parser.add_argument("--page", type=Path, help="file for the page; default: the terminal")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        cells = [(method, epsilon, seed) for seed in args.seeds for epsilon in args.epsilons for method in args.methods]
        selected = {cell: select_rate(cell, args, work) for cell in cells}
    text = format_page(selected, args)
    if args.page is None:
        print(text)
    else:
        args.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
