"""Whole runs of fedspan: the federation's own time, memory, and accuracy by number format."""

from __future__ import annotations

import argparse
import copy
import csv
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from engines.contenders import run_once
from engines.page import SHAPES, Limit, format_table, measure_products
from engines.speed import LAST, NEAR, RESULTS, SUBJECT
from engines.work import Work

__all__ = [
    "measure_accuracy",
    "measure_evaluation",
    "measure_first_round",
    "measure_memory",
    "measure_overhead",
    "profile_round",
]

MIB = 2**20
OVERHEAD, STACKED, REGISTERED = 0.05, 1.3, 1.1
"""Limits: share of a round; peak memory against one client's; of many registered clients against few."""
EVALUATED, OWN = 4, 32
"""Personal models that are evaluated, and examples of each client, half of them for training."""
STARTED = 8
"""Clients of the rounds that fill a cache of hidden states."""
PRODUCTS = {32: 1.3}
"""Most of a round's time against that of its products of matrices alone, by batch."""


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
        *format_table(["batch", "s a round", "of it the federation", "share"], rows),
    ]
    return lines, limits


def measure_evaluation(args: argparse.Namespace) -> tuple[list[str], list[Limit]]:
    """Personal models in passes that they share, against one after another."""
    folder = args.out / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    clients = min(EVALUATED, args.clients)
    rows: list[list[str]] = []
    limits: list[Limit] = []
    for dtype in ("float32", "bfloat16"):
        engine = {"name": "batched", "clients_per_pass": args.at_once, "workers": 1}
        values = change_config(
            Work(args.data, 4, OWN, clients, threads=args.threads).values(dtype, engine),
            data={"test": str(args.data / "test.csv")},
            partition={"test": 0.5},
            method={"name": "local-only"},
        )
        config = folder / f"evaluation-{dtype}.json"
        config.write_text(json.dumps(values))
        arguments = [str(config), str(args.repetitions)]
        result = run_once("fedspan_evaluation.py", arguments, args.threads, config.with_suffix(".log"))
        print(f"  evaluation, {dtype}: {result}", flush=True)
        for part, seconds in result["seconds"].items():
            count = result["examples"][part]
            faster = [loop / batched for loop, batched in zip(seconds["loop"], seconds["batched"], strict=True)]
            medians = [f"{1000 * statistics.median(seconds[name]) / count:.2f}" for name in ("batched", "loop")]
            spread = f"{statistics.median(faster):.2f} ({min(faster):.2f} to {max(faster):.2f})"
            rows.append([dtype, f"{count // clients} {part}", *medians, spread])
        if dtype == "float32":
            gap = max(result["gaps"].values())
            quantity = "evaluation of personal models: largest difference of float32 losses from the loop engine's"
            limits.append(Limit(quantity, f"{gap:.0e}", f"at most {NEAR:g}", gap <= NEAR))
    lines = [
        "## Evaluation of personal models",
        "",
        f"{clients} personal models after a round of local training, each on its client's own examples and all on one "
        f"held-out set, in batches of 64. The batched engine lets up to {args.at_once} models share a pass, in one "
        "worker; the loop engine, in the same process and in turns with it, evaluates one model after another.",
        "",
        *format_table(
            ["number format", "examples of a model", "batched, ms an example", "loop", "times faster (range)"], rows
        ),
    ]
    return lines, limits


def measure_first_round(args: argparse.Namespace) -> tuple[list[str], list[Limit]]:
    """Whether a first round ends sooner if hidden states are computed as clients begin to train."""
    folder = args.out / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    clients = min(STARTED, args.clients)
    rows: list[list[str]] = []
    for workers in dict.fromkeys((1, args.threads)):
        engine = {"name": "batched", "clients_per_pass": args.at_once, "workers": workers}
        work = Work(args.data, 4, args.examples[4], clients, LAST, args.threads)
        config = folder / f"first-round-{workers}.json"
        config.write_text(json.dumps(work.values("bfloat16", engine)))
        arguments = [str(config), str(args.repetitions)]
        result = run_once("fedspan_first_round.py", arguments, args.threads, config.with_suffix(".log"))
        print(f"  first round, {workers} workers: {result}", flush=True)
        before, within = result["rounds"].values()
        for number, clock in enumerate(("clock", "processor")):
            ratios = [late[number] / early[number] for early, late in zip(before, within, strict=True)]
            medians = [f"{statistics.median(one[number] for one in measured):.2f}" for measured in (before, within)]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            apart = max(abs(late[2] / early[2] - 1) for early, late in zip(before, within, strict=True))
            rows.append([str(workers), clock, *medians, spread, f"{apart:.0e}"])
    lines = [
        "## When the cache of hidden states is filled",
        "",
        f"Seconds of the first round of {clients} clients, adapters on the last 2 of 6 layers, in bfloat16. fedspan "
        "computes the hidden states of all clients of the round before the first one trains; here, it also computes "
        "each client's when the client begins to train, in turns with it.",
        "",
        *format_table(
            ["workers", "seconds of", "before training", "as clients begin", "ratio (range)", "losses differ by"], rows
        ),
    ]
    return lines, []


def profile_round(args: argparse.Namespace) -> tuple[list[str], list[Limit]]:
    """What bounds a round, by kinds of operators."""
    folder = args.out / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    profiles: list[dict[str, float]] = []
    limits: list[Limit] = []
    rates = [measure_products(shape, args.threads)[torch.bfloat16] for shape in SHAPES]
    rate = statistics.harmonic_mean(rates)
    bounds: list[str] = []
    for batch, examples in args.examples.items():
        work = Work(args.data, batch, examples, args.clients, threads=args.threads)
        engine = {"name": "batched", "clients_per_pass": max(1, 64 // batch), "workers": 1}
        config = folder / f"profile-{batch}.json"
        config.write_text(json.dumps(work.values("bfloat16", engine)))
        result = run_once("fedspan_profile.py", [str(config)], args.threads, config.with_suffix(".log"))
        profiles.append(result["milliseconds"])
        print(f"  profile, batch {batch}: {profiles[-1]}", flush=True)
        bound = result["operations"] / rate / 1e6
        bounds.append(f"batch {batch} {bound:.2f} ms ({result['operations'] / 1e9:.2f} billion operations)")
        if batch in PRODUCTS and f"batch{batch}" in args.sections:
            measured = json.loads((args.out / f"batch-{batch}" / RESULTS).read_text())[SUBJECT]["rounds"]
            taken = statistics.median(1000 * round["seconds"] / round["examples"] for round in measured)
            kept = taken <= PRODUCTS[batch] * bound if args.judged else None
            quantity = f"batch {batch}: in bfloat16, a round's time against that of its products of matrices"
            limits.append(Limit(quantity, f"{taken / bound:.2f}", f"at most {PRODUCTS[batch]:g} times", kept))
    rows: list[list[str]] = []
    for kind in profiles[0]:
        shares = [f"{one[kind]:.2f} ({one[kind] / sum(one.values()):.0%})" for one in profiles]
        rows.append([kind, *shares])
    lines = [
        "## What bounds a round",
        "",
        "PyTorch's profiler over a round of the batched engine in bfloat16, one worker with all threads, as many "
        "clients at once as make 64 examples: milliseconds an example in operators of a kind (share of the round). "
        "The profiler itself adds to small operators.",
        "",
        *format_table(["", *(f"batch {batch}" for batch in args.examples)], rows),
        "An example's products of matrices, at the speed of the model's own shapes in the table above "
        f"({rate:.0f} GFLOP/s in bfloat16), would take: {'; '.join(bounds)}.",
        "",
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
        *format_table(["", "loaded", "peak"], rows),
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
    path = folder / "registered.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "category"])
        for number in range(2 * args.registered):
            row = rows[number % len(rows)]
            writer.writerow([f"{row['text']} {number // len(rows)}", row["category"]])
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
        *format_table(["seed", "float32", "bfloat16", "difference"], rows),
    ]
    return lines, []
