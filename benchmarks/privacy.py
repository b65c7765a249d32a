"""Methods under differential privacy: RoLoRA, FFA-LoRA, FedASK, LA-LoRA and FedSVD at the same epsilon.

    python benchmarks/privacy.py --task sst2 banking77 --data PATH/glue/SST-2 PATH/banking77 \
        --page docs/results/privacy.md

DP-SGD on every client; the noise is the smallest with which all rounds stay within epsilon. All methods train the same
clients from the same seeds at each of the given learning rates, and the rate is selected on validation examples; this
selection is not counted in epsilon. The page has a section for each task. ``--work`` keeps the runs, and what is there
is not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

METHODS = ("rolora", "ffa-lora", "fedask", "la-lora", "fedsvd")


@dataclass(frozen=True)
class Task:
    """A task that is compared.

    Args:
        name: Name on the page.
        rounds: Rounds of a run, unless ``--rounds`` says otherwise.
        data: Section ``data`` of the config; its files are relative to the task's folder.
    """

    name: str
    rounds: int
    data: Mapping[str, Any]


TASKS: Mapping[str, Task] = {
    "sst2": Task(
        "SST-2",
        10,
        {"train": "train.tsv", "test": "dev.tsv", "text": "sentence", "label": "label", "max_examples": 20_000},
    ),
    "banking77": Task(
        "Banking77's first 20 intents",
        20,
        {"train": "train.csv", "test": "test.csv", "text": "text", "label": "category", "first_labels": 20},
    ),
}
DELTA = 1e-5

Cell = tuple[str, str, float, int]
"""Task, method, epsilon (0: no privacy) and seed."""
Selected = tuple[float, Mapping[str, Any]]
"""The learning rate that validation selected, and the report of its run."""


def get_rounds(task: str, args: argparse.Namespace) -> int:
    """Return the rounds of a task's runs."""
    return TASKS[task].rounds if args.rounds is None else args.rounds


def build_config(cell: Cell, lr: float, args: argparse.Namespace) -> dict[str, Any]:
    """Build the config of a run, as a user would write it."""
    name, method, epsilon, seed = cell
    data, folder = TASKS[name].data, args.data[args.task.index(name)]
    rounds = get_rounds(name, args)
    values: dict[str, Any] = {
        "seed": seed,
        "threads": 1,
        "model": {"name": args.model, "target_modules": ["query", "value"], "layers_to_transform": args.layers},
        "data": {**data, "train": str(folder / data["train"]), "test": str(folder / data["test"])},
        "partition": {"partitioner": "iid", "clients": args.clients},
        "method": {"name": method, "r": 8, "lora_alpha": 16},
        "federation": {"rounds": rounds, "early_stopping": None},
        "training": {"lr": lr, "batch_size": args.batch_size, "local_steps": args.steps},
        "evaluation": {"every": rounds},
    }
    if epsilon:
        values["privacy"] = {"mechanism": "dp-sgd", "epsilon": epsilon, "delta": DELTA, "clip": args.clip}
    return values


def run_cell(cell: Cell, lr: float, args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Return the report of a run, which is done if it is not there yet."""
    from fedspan.config import parse_config
    from fedspan.runs.start import run
    from fedspan.training.prefix_rows import start_next_run

    task, method, epsilon, seed = cell
    folder = work / f"{task}-{method}-epsilon{epsilon:g}-lr{lr:g}-seed{seed}"
    if not (folder / "report.json").exists():
        began = time.process_time()
        start_next_run()
        run(parse_config(build_config(cell, lr, args)), folder, resume=(folder / "config.yaml").exists())
        print(f"{folder.name}: {time.process_time() - began:.0f} processor seconds", flush=True)
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))


def select_rate(cell: Cell, args: argparse.Namespace, work: Path) -> Selected:
    """Return the learning rate with the best validation accuracy, the smaller one of equals, and its report."""
    reports = {lr: run_cell(cell, lr, args, work) for lr in sorted(args.rates)}
    best = max(reports, key=lambda lr: (reports[lr]["scores"]["validation"]["accuracy"], -lr))
    return best, reports[best]


def format_rate(lr: float, rates: Sequence[float]) -> str:
    """Format a selected learning rate, with a mark if it is at an end of the grid."""
    mark = "" if len(rates) < 2 else " ↓" if lr == min(rates) else " ↑" if lr == max(rates) else ""
    return f"{lr:g}{mark}"


def format_score(selected: Sequence[Selected], rates: Sequence[float]) -> str:
    """Format the accuracy of a method at one epsilon over the seeds, with the selected learning rates."""
    scores = np.array([100 * report["scores"]["test"]["accuracy"] for _, report in selected])
    spread = f" ± {scores.std(ddof=1):.1f}" if len(scores) > 1 else ""
    chosen = ", ".join(format_rate(lr, rates) for lr in sorted({lr for lr, _ in selected}))
    return f"{scores.mean():.1f}{spread} ({chosen})"


def format_section(task: str, selected: Mapping[Cell, Selected], args: argparse.Namespace) -> str:
    """Format the section of a task: its settings, and a row for each method."""

    def count_megabytes(method: str) -> str:
        sizes = [sum(selected[task, method, args.epsilons[0], seed][1]["bytes"].values()) for seed in args.seeds]
        return f"{np.mean(sizes) / 1e6:.2f}"

    def describe(method: str, epsilon: float) -> str:
        return format_score([selected[task, method, epsilon, seed] for seed in args.seeds], args.rates)

    most = TASKS[task].data.get("max_examples")
    examples = "" if most is None else f"; {most:,} examples, validation and the clients' tests included"
    heads = ["without privacy" if not epsilon else f"ε = {epsilon:g}" for epsilon in args.epsilons]
    lines = [
        f"## {TASKS[task].name}",
        "",
        f"{get_rounds(task, args)} rounds{examples}.",
        "",
        f"| method | {' | '.join(heads)} | MB |",
        f"|{'---|' * (len(heads) + 2)}",
        *(
            f"| {method} | {' | '.join(describe(method, one) for one in args.epsilons)} | {count_megabytes(method)} |"
            for method in args.methods
        ),
    ]
    return "\n".join(lines)


def format_page(selected: Mapping[Cell, Selected], args: argparse.Namespace) -> str:
    """Format the page, with the command, the machine and the date."""
    import torch

    options = {"clients": args.clients, "steps": args.steps, "batch-size": args.batch_size}
    if args.rounds is not None:
        options["rounds"] = args.rounds
    layers = " and ".join(map(str, args.layers))
    options_text = " ".join(f"--{name} {value}" for name, value in options.items())
    lists = {"layers": args.layers, "epsilons": args.epsilons, "rates": args.rates, "seeds": args.seeds}
    lists_text = " ".join(f"--{name} {' '.join(f'{value:g}' for value in values)}" for name, values in lists.items())
    if args.methods != list(METHODS):
        lists_text += f" --methods {' '.join(args.methods)}"
    folders = " ".join(f"PATH/{folder.name}" for folder in args.data)
    tasks = " and ".join(TASKS[task].name for task in args.task)
    lines = [
        "# Methods under differential privacy",
        "",
        f"This page compares methods under DP-SGD at the same ε, on {tasks}.",
        "",
        f"Command: `python benchmarks/privacy.py --task {' '.join(args.task)} --data {folders} {options_text} "
        f"--clip {args.clip:g} {lists_text}`  ",
        f"Date: {time.strftime('%Y-%m-%d')}. Machine: {platform.machine()}, {os.cpu_count()} cores, "
        f"torch {torch.__version__}, 1 thread.",
        "",
        f"{args.model.removeprefix('builtin:')}, rank 8 on query and value of layer {layers}, counted from 0; "
        f"{args.clients} clients of equal "
        f"distribution, rounds of {args.steps} steps with batches of {args.batch_size} on average; δ = "
        f"{DELTA:g}, gradients of single examples clipped to {args.clip:g}, AdamW, a random head that trains and is "
        "averaged. Held-out accuracy in % after the last round, with the learning rate selected on validation examples "
        f"in brackets; {len(args.seeds)} {'seed' if len(args.seeds) == 1 else 'seeds'}. Megabytes are those of all "
        "messages of a run, headers included.",
        "",
        f"The learning rates are {', '.join(f'{lr:g}' for lr in sorted(args.rates))}. ↓ and ↑ mark the smallest and "
        "the largest of them: beyond it the method may score higher.",
        *(f"\n{format_section(task, selected, args)}" for task in args.task),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the cells and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", nargs="+", choices=TASKS, required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="folder of each task, in the same order")
    parser.add_argument("--model", default="builtin:all-minilm-l6-v2")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 3.0, 8.0], help="0: without privacy")
    parser.add_argument("--layers", type=int, nargs="+", default=[5], help="layers with adapters, counted from 0")
    parser.add_argument("--clients", type=int, default=4)
    rounds = ", ".join(f"{task.rounds} of {name}" for name, task in TASKS.items())
    parser.add_argument("--rounds", type=int, help=f"rounds of all tasks; default: {rounds}")
    parser.add_argument("--steps", type=int, default=10, help="local steps in a round")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-3, 8e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--work", type=Path, help="folder for the runs; default: a temporary one")
    parser.add_argument("--page", type=Path, help="file for the page; default: the terminal")
    args = parser.parse_args()
    if len(args.data) != len(args.task):
        parser.error(f"--data: {len(args.data)} folders for {len(args.task)} tasks")
    from fedspan.training.prefix_rows import share_prefixes

    with tempfile.TemporaryDirectory() as temporary, share_prefixes():
        work = args.work or Path(temporary)
        cells = itertools.product(args.task, args.methods, args.epsilons, args.seeds)
        selected = {cell: select_rate(cell, args, work) for cell in cells}
    text = format_page(selected, args)
    if args.page is None:
        print(text)
    else:
        args.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
