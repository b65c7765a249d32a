"""Whole runs of fedspan: the federation's own time, memory, and accuracy by number format."""

import argparse
import copy
import csv
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from evidence.claims.report import format_table
from evidence.pages.engines.contenders import run_once
from evidence.pages.engines.page import Limit
from evidence.pages.engines.work import Work
from evidence.pages.subsets import write_rows

MIB = 2**20
OVERHEAD, STACKED, REGISTERED = 0.05, 1.3, 1.1
"""Limits: share of a round; peak memory against one client's; of many registered clients against few."""


def run_config(values: dict[str, Any], args: argparse.Namespace, name: str) -> dict[str, Any]:
    """A run in a process of its own."""
    folder = args.out / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / f"{name}.json"
    config.write_text(json.dumps(values))
    with tempfile.TemporaryDirectory(dir=folder) as run_folder:
        result = run_once(
            "fedspan_run.py", [str(config), str(Path(run_folder) / "run")], args.threads, config.with_suffix(".log")
        )
    (folder / f"{name}-result.json").write_text(json.dumps(result, indent=1))
    print(f"  {name}: {result}", flush=True)
    return result


def change_config(values: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    """A config with some options set."""
    result = copy.deepcopy(values)
    for section, options in sections.items():
        result[section] = {**result.get(section, {}), **options}
    return result


def measure_overhead(args: argparse.Namespace) -> tuple[list[str], list[Limit]]:
    """What of a round is not training or evaluation."""
    rows: list[list[str]] = []
    limits: list[Limit] = []
    for batch, examples in args.examples.items():
        work = Work(args.data, batch, examples, args.clients, threads=args.threads)
        values = change_config(
            work.values("bfloat16", {"name": "batched"}), federation={"rounds": args.repetitions + 1}
        )
        result = run_config(values, args, f"overhead-{batch}")
        seconds, outside = result["seconds"][1:], result["outside"][1:]
        share = statistics.median(other / total for other, total in zip(outside, seconds, strict=True))
        rows.append(
            [str(batch), f"{statistics.median(seconds):.2f}", f"{statistics.median(outside):.3f}", f"{share:.1%}"]
        )
        kept = share < OVERHEAD if args.judged else None
        limits.append(
            Limit(f"batch {batch}: the federation's share of a round", f"{share:.1%}", f"below {OVERHEAD:.0%}", kept)
        )
    lines = [
        "## The federation's own time",
        "",
        "Measured in a whole run with ledger, checkpoints and logs, with the batched engine in bfloat16. The "
        "federation's time is the part of a round outside the engine's training: messages, the method's steps on "
        "clients and server, reduction, update and commit. The first round, in which the engine measures how many "
        "clients to stack, is left out.",
        "",
        format_table(["batch", "s a round", "of it the federation", "share"], rows) + "\n",
    ]
    return lines, limits


def measure_memory(args: argparse.Namespace) -> tuple[list[str], list[Limit]]:
    """Peaks: many clients against one at as many tokens in flight, and many registered ones against few."""
    at_once, batch = args.at_once, 4
    stacked = {"name": "batched", "clients_per_pass": at_once, "workers": 1}
    single_client = {"name": "batched", "clients_per_pass": 1, "workers": 1}
    examples = args.examples[batch]
    many = Work(args.data, batch, examples, args.clients, threads=args.threads).values("bfloat16", stacked)
    one = Work(args.data, batch * at_once, examples * args.clients, 1, threads=args.threads).values(
        "bfloat16", single_client
    )
    two = {"rounds": 2}
    results = {
        f"1 client, batch {batch * at_once}": run_config(change_config(one, federation=two), args, "memory-one"),
        f"{args.clients} clients, {at_once} at once, batch {batch}": run_config(
            change_config(many, federation=two), args, "memory-many"
        ),
    }
    limits = [limit("50 clients against one: peak memory", results, STACKED, args)]
    with tempfile.TemporaryDirectory(dir=args.out) as folder:
        data = {"train": str(write_registered_data(args, Path(folder))), "max_examples": None}
        wide = change_config(many, data=data, training={"batch_size": 2, "local_steps": 1})
        names = [f"{args.clients} registered clients", f"{args.registered} registered clients, a cohort of 100"]
        pair = {
            names[0]: run_config(change_config(wide, federation=two), args, "memory-few-registered"),
            names[1]: run_config(
                change_config(
                    wide,
                    partition={"clients": args.registered},
                    federation={**two, "clients_per_round": min(100, args.registered)},
                ),
                args,
                "memory-many-registered",
            ),
        }
    limits.append(limit(f"{args.registered} registered clients: peak memory", pair, REGISTERED, args))
    rows = [
        [name, f"{result['loaded'] / MIB:.0f}", f"{result['peak'] / MIB:.0f}"]
        for name, result in {**results, **pair}.items()
    ]
    lines = [
        "## Peak memory",
        "",
        "Resident memory of the process in MiB: when model and data are loaded, and at its highest in two rounds with "
        "their checkpoints. The last two rows share a file of two examples for each registered client; each client "
        "of the cohort takes one step of 2 examples.",
        "",
        format_table(["", "loaded", "peak"], rows) + "\n",
    ]
    return lines, limits


def limit(quantity: str, results: dict[str, dict[str, Any]], most: float, args: argparse.Namespace) -> Limit:
    """The second peak against the first."""
    first, second = (result["peak"] for result in results.values())
    kept = second <= most * first if args.judged else None
    return Limit(quantity, f"{second / first:.2f}", f"at most {most:g} times", kept)


def write_registered_data(args: argparse.Namespace, folder: Path) -> Path:
    """A csv with two examples for each registered client: Banking77's again and again, numbered."""
    with (args.data / "train.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    path, count = folder / "registered.csv", len(rows)
    numbered = ((rows[number % count], number // count) for number in range(2 * args.registered))
    write_rows(path, ("text", "category"), ((f"{row['text']} {time}", row["category"]) for row, time in numbered))
    return path


def measure_accuracy(args: argparse.Namespace) -> tuple[list[str], list[Limit]]:
    """Test accuracy of the same runs in both number formats."""
    scores: dict[str, list[float]] = {"float32": [], "bfloat16": []}
    for seed in args.accuracy_seeds:
        for dtype, runs in scores.items():
            per_client = args.accuracy_examples // args.clients
            work = Work(args.data, 16, per_client, args.clients, threads=args.threads, seed=seed)
            values = change_config(
                work.values(dtype, {"name": "batched"}),
                data={"test": str(args.data / "test.csv")},
                federation={"rounds": args.accuracy_rounds},
                training={"lr": args.accuracy_lr},
                evaluation={"every": args.accuracy_rounds},
            )
            result = run_config(values, args, f"accuracy-{dtype}-{seed}")
            runs.append(100 * result["scores"]["test"]["accuracy"])
    rows = [
        [str(seed), f"{wide:.2f}", f"{narrow:.2f}", f"{narrow - wide:+.2f}"]
        for seed, wide, narrow in zip(args.accuracy_seeds, scores["float32"], scores["bfloat16"], strict=True)
    ]
    apart = statistics.mean(scores["bfloat16"]) - statistics.mean(scores["float32"])
    lines = [
        "## Accuracy by number format",
        "",
        f"FedIT, {args.clients} clients, {args.accuracy_examples} training examples, {args.accuracy_rounds} rounds of "
        f"one epoch at batch 16 and learning rate {args.accuracy_lr:g}: test accuracy in percent. The tensors "
        f"that train are float32 in both. bfloat16 minus float32, mean over seeds: {apart:+.2f} points.",
        "",
        format_table(["seed", "float32", "bfloat16", "difference"], rows) + "\n",
    ]
    return lines, []
