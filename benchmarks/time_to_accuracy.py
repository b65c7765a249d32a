"""Time to a test accuracy, on the simulated clock, of synchronous, over-selected and asynchronous rounds.

    python benchmarks/time_to_accuracy.py --data PATH/banking77 --page docs/results/time-to-accuracy.md

FedIT on the first ten intents of Banking77: twenty clients by a Dirichlet distribution, whose speeds differ by up to
ten times. In every way of running rounds, ten clients train at a time. A run ends when it reaches the highest accuracy
of ``TARGETS``, or after ``LIMIT`` simulated seconds.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from fedspan.config import parse_config
from fedspan.runs.setup import Prepared, prepare
from fedspan.transports.in_process import simulate

CLIENTS = 20
ALPHA = 0.5
EXAMPLES = 800
TARGETED = [f"layer.{layer}.attention.self.{name}" for layer in (4, 5) for name in ("query", "value")]
"""Of the last two of six layers, so that the frozen ones run once an example."""
SPEED = {"distribution": "uniform", "median": 20, "spread": math.sqrt(10)}
"""Speeds between the median over and times the root of ten."""
SEEDS = (0, 1, 2)
TARGETS = (0.6, 0.7, 0.8, 0.9)
LIMIT = 80.0
REPLIES = 10
"""Number of replies between two evaluations."""
WAYS: dict[str, Mapping[str, Any]] = {
    "synchronous": {"clients_per_round": 10},
    "over-selected": {"clients_per_round": 7, "over_select": 3, "deadline": 4},
    "asynchronous, K = 5": {"clients_per_round": 5, "buffered": {"concurrency": 10}},
    "asynchronous, K = 2": {"clients_per_round": 2, "buffered": {"concurrency": 10}},
}
"""Settings of ``federation``."""


@dataclass
class Course:
    """What a run reaches.

    Args:
        seconds: Simulated seconds until each target; infinite: not reached.
        updates: Number of updates of the model until the run ended.
        replies: Number of replies that entered them.
        staleness: Mean age of these replies, in updates.
        best: Highest test accuracy.
    """

    seconds: dict[float, float] = field(default_factory=lambda: dict.fromkeys(TARGETS, math.inf))
    updates: int = 0
    replies: int = 0
    staleness: float = 0.0
    best: float = 0.0


def build_config(way: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the config of a run, as a user would write it."""
    return {
        "seed": seed,
        "threads": 1,
        "model": {"name": args.model, "target_modules": TARGETED, "head_init": "random"},
        "data": {
            "train": str(args.data / "train.csv"),
            "test": str(args.data / "test.csv"),
            "label": "category",
            "first_labels": 10,
            "max_examples": EXAMPLES,
        },
        "partition": {"partitioner": "dirichlet", "alpha": ALPHA, "clients": CLIENTS},
        "method": {"name": "fedit", "r": 8, "lora_alpha": 16},
        "federation": {"rounds": 1000, **WAYS[way]},
        "training": {"lr": args.lr, "batch_size": 8},
        "simulation": {"speed": SPEED},
        "engine": {"clients_per_pass": 4},
    }


def run(prepared: Prepared, way: str, seed: int, args: argparse.Namespace) -> Course:
    """Run rounds until the highest target or the limit of time; all ways of a seed share the model and the data."""
    assert prepared.test is not None
    config, base = parse_config(build_config(way, seed, args)), prepared.federation
    assert config.simulation is not None
    federation = simulate(
        base.method,
        base.engine,
        base.clients,
        base.examples,
        config.build_round_settings(),
        config.build_simulation_rules(),
        conditions=config.simulation.build_conditions(seed),
    )
    course = Course()
    progress, clock, ages, evaluated = federation.begin(), 0.0, 0, 0
    while clock < LIMIT and math.isinf(course.seconds[TARGETS[-1]]):
        result = federation.run_round(progress)
        assert result.simulated_seconds is not None
        progress, clock, course.updates = result.progress, clock + result.simulated_seconds, course.updates + 1
        arrivals = result.arrivals
        ages += sum(age for _, age in arrivals or ())
        failed = {*result.late, *(failure.client for failure in result.failures)}
        course.replies += len(result.cohort) - len(failed)
        if course.replies - evaluated < REPLIES * 0.7:
            continue
        evaluated = course.replies
        accuracy = float(prepared.evaluator.evaluate_heldout(progress, prepared.test)["global"]["accuracy"])
        course.best = max(course.best, accuracy)
        for target in TARGETS:
            if accuracy >= target:
                course.seconds[target] = min(course.seconds[target], clock)
    course.staleness = ages / max(1, course.replies)
    return course


def format_mean(values: Sequence[float], digits: int) -> str:
    """Return the mean with the standard deviation over seeds; how many reached it if not all did."""
    reached = [value for value in values if math.isfinite(value)]
    if len(reached) < len(values):
        return f"{len(reached)} of {len(values)} seeds"
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{spread}"


def build_table(courses: Mapping[str, Sequence[Course]]) -> str:
    """Return the table of all ways."""
    titles = [*(f"{target:.0%}" for target in TARGETS), "updates", "replies", "mean age"]
    rows = [f"| rounds | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for way, of_seeds in courses.items():
        cells = [format_mean([course.seconds[target] for course in of_seeds], 1) for target in TARGETS]
        cells += [format_mean([getattr(course, name) for course in of_seeds], 0) for name in ("updates", "replies")]
        rows.append(f"| {way} | {' | '.join(cells)} | {format_mean([one.staleness for one in of_seeds], 1)} |")
    return "\n".join(rows) + "\n"


def build_page(table: str, args: argparse.Namespace, minutes: float) -> str:
    """Return the page with the table, the command, the machine and the date."""
    import torch

    settings = "\n".join(
        f"- **{way}**: `{', '.join(f'{name}: {value}' for name, value in options.items())}`"
        for way, options in WAYS.items()
    ).replace("'", "")
    seeds = " ".join(map(str, args.seeds))
    return (
        "# Time to accuracy\n\n"
        "This page compares how long synchronous, over-selected and [asynchronous](../asynchronous.md) rounds take to "
        "a test accuracy if the clients' speeds differ by ten times.\n\n"
        f"Simulated seconds to a test accuracy; mean ± standard deviation over {len(args.seeds)} seeds. Updates, "
        "replies and the mean age of the replies, in updates, are those until the run ended: at the highest accuracy, "
        f"or after {LIMIT:g} simulated seconds.\n\n{table}\n"
        f"FedIT (rank 8) on the last two layers of all-MiniLM-L6-v2 with a random head, learning rate "
        f"{args.lr:g}, one local epoch; the first "
        f"ten intents of Banking77, {EXAMPLES} training examples, {CLIENTS} clients by a Dirichlet distribution "
        f"({ALPHA:g}). `simulation.speed` is uniform, from {20 / math.sqrt(10):.1f} to {20 * math.sqrt(10):.1f} "
        "examples a second. Ten clients train at a time in every way:\n\n"
        f"{settings}\n\n"
        f"The accuracy is measured after about every {REPLIES} replies (over-selected: 7, K = 2: 8). "
        "Transfers and the server take no simulated time.\n\n"
        f"Command: `python benchmarks/time_to_accuracy.py --data PATH/banking77 --seeds {seeds}`  \n"
        f"Date: {time.strftime('%Y-%m-%d')}. Machine: {platform.machine()}, {multiprocessing.cpu_count()} cores, torch "
        f"{torch.__version__}, one thread, {minutes:.0f} minutes.\n"
    )


def main() -> None:
    """Run all ways, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of Banking77")
    parser.add_argument("--model", default="builtin:all-minilm-l6-v2")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--page", type=Path, help="write the table to this file")
    args = parser.parse_args()
    began, courses = time.monotonic(), dict[str, list[Course]]()
    for seed in args.seeds:
        prepared = prepare(parse_config(build_config(next(iter(WAYS)), seed, args)))
        for way in WAYS:
            started = time.monotonic()
            courses.setdefault(way, []).append(run(prepared, way, seed, args))
            print(f"seed {seed}, {way}: {courses[way][-1]} ({time.monotonic() - started:.0f} s)", flush=True)
    table = build_table(courses)
    print(table)
    if args.page is not None:
        page = build_page(table, args, (time.monotonic() - began) / 60)
        args.page.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
