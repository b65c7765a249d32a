"""What a round costs between machines, beside its training: three nodes on this machine, TLS, keys.

    python -m evidence.regression.deployment --page docs/results/deployment.md

all-MiniLM-L6-v2 on the patients' messages, FedIT of rank 8; every client takes one step of one example a round, so that
a round measures the cost of the way to the clients and back, by the rounds' lines in metrics.jsonl, with an evaluation
only in the last one. ``--before CHECKOUT`` measures the code of another checkout, such as a worktree of an earlier
commit, in turns with this one's: deployment after deployment, each with its own server and nodes.
"""

import argparse
import csv
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml

from fedspan.data.builtin import find_corpus_file
from tests.helpers.stage import Deployment

NODES = ("clinic-a", "clinic-b", "clinic-c")
LIMIT = 5.0
"""Required seconds of a round."""
SLOWER = 1.05
"""Longest round over that of another checkout."""


def write_partition(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """The corpus in as many files as nodes, and its labels."""
    source = find_corpus_file("builtin:patient-messages", "train", "data.train")
    rows = list(csv.DictReader(source.read_text(encoding="utf-8").splitlines()))
    paths: dict[str, Path] = {}
    for number, id in enumerate(NODES):
        paths[id] = folder / f"{id}.csv"
        with paths[id].open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows[number :: len(NODES)])
    return paths, sorted({row["label"] for row in rows})


def measure(
    rounds: int, federation: Mapping[str, Any] | None = None, *, insecure: bool = False
) -> tuple[list[float], int]:
    """Seconds of each round but the first and the last, and bytes that a client is sent and sends in one.

    Args:
        rounds: Number of rounds.
        federation: Further settings of the run's section ``federation``.
        insecure: Whether the deployment has neither TLS nor keys, and so no signatures.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data, labels = write_partition(folder)
        config = {
            "model": {"name": "builtin:all-minilm-l6-v2", "target_modules": ["query", "value"]},
            "data": {"labels": labels},
            "partition": {"clients": len(NODES), "validation": 0.0, "test": 0.1},
            "federation": {"rounds": rounds, **(federation or {})},
            "training": {"local_steps": 1, "batch_size": 1},
            "evaluation": {"every": rounds},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        with Deployment(folder / "deployment", insecure=insecure) as deployment:
            for id in NODES:
                deployment.join(id, deployment.node_file(id, data[id], test=0.1))
            deployment.submit(folder / "config.yaml", folder / "run")
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    marks = [line["seconds"] for line in lines]
    traffic = lines[-1]["bytes"]
    seconds = [after - before for before, after in pairwise(marks[:-1])]
    return seconds, (traffic["down"] + traffic["up"]) // rounds // len(NODES)


def measure_checkout(rounds: int, checkout: Path) -> list[float]:
    """Return the seconds of the rounds of a checkout's deployment, measured by its own copy of this module.

    An earlier checkout has other functions and other names in a node's file, which its own copy knows.
    """
    code = "import json, sys; from evidence.regression import deployment; "
    code += "json.dump(deployment.measure(int(sys.argv[1]))[0], open(sys.argv[2], 'w'))"
    path = os.pathsep.join((str(checkout / "src"), str(checkout)))
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "seconds.json"
        command = [sys.executable, "-c", code, str(rounds), str(result)]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, cwd=folder, check=True)
        return json.loads(result.read_text())


def measure_pairs(rounds: int, before: Path, repetitions: int) -> list[tuple[list[float], list[float]]]:
    """Return the seconds of the rounds of another checkout and of this one, of as many deployments of each, in turns.

    The order changes from pair to pair.
    """
    repository, pairs = Path(__file__).resolve().parents[2], list[tuple[list[float], list[float]]]()
    for number in range(repetitions):
        checkouts = (before, repository) if number % 2 == 0 else (repository, before)
        seconds = {checkout: measure_checkout(rounds, checkout) for checkout in checkouts}
        pairs.append((seconds[before], seconds[repository]))
        medians = [f"{statistics.median(seconds[checkout]):.3f} s" for checkout in (before, repository)]
        print(f"pair {number + 1}: {', '.join(medians)}")
    return pairs


def pair_table(pairs: Sequence[tuple[list[float], list[float]]], commit: str) -> list[str]:
    """Return the section about another checkout and this one."""
    medians = [(statistics.median(old), statistics.median(new)) for old, new in pairs]
    ratios = [new / old for old, new in medians]
    ratio = statistics.median(ratios)
    rows = [f"| {number} | {old:.3f} | {new:.3f} | {new / old:.2f} |" for number, (old, new) in enumerate(medians, 1)]
    return [
        "",
        f"## Beside commit {commit}",
        "",
        f"Deployments of both, in turns: median seconds of a round. The median ratio is {ratio:.2f}, wanted at most "
        f"{SLOWER:g}: {'pass' if ratio <= SLOWER else '**FAIL**'}.",
        "",
        "| pair | before, s | now, s | now / before |",
        "|---|---|---|---|",
        *rows,
    ]


def get_commit(checkout: Path) -> str:
    """Return the short name of a checkout's commit."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=22)
    parser.add_argument("--page", type=Path, help="write the table to this file")
    parser.add_argument("--before", type=Path, help="another checkout, to measure beside this one")
    parser.add_argument("--repetitions", type=int, default=3, help="pairs of deployments, with --before")
    args = parser.parse_args()
    seconds, size = measure(args.rounds)
    middle, repeated = statistics.median(seconds), ""
    if args.before:
        repeated = f" --before CHECKOUT --repetitions {args.repetitions}"
    lines = [
        "# Overhead of a round in a deployment",
        "",
        "This page measures the overhead of a round beside training: three nodes on one machine, TLS and keys, "
        f"all-MiniLM-L6-v2, one step of one example and {size / 1e6:.1f} MB per client and round, "
        f"{len(seconds)} rounds.",
        "",
        f"Command: `python -m evidence.regression.deployment --rounds {args.rounds}{repeated}`  ",
        f"Date: {datetime.date.today()}. Machine: {platform.machine()}, {os.cpu_count()} cores, torch "
        f"{torch.__version__}.",
        "",
        "| seconds per round | measured | goal |  |",
        "|---|---|---|---|",
        f"| median | {middle:.2f} | below {LIMIT:g} | {'pass' if middle < LIMIT else '**FAIL**'} |",
        f"| smallest | {min(seconds):.2f} |  |  |",
        f"| largest | {max(seconds):.2f} |  |  |",
    ]
    if args.before:
        pairs = measure_pairs(args.rounds, args.before.resolve(), args.repetitions)
        lines += pair_table(pairs, get_commit(args.before))
    text = "\n".join(lines) + "\n"
    print(text)
    if args.page:
        args.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
