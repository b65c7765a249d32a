"""What a round costs between machines, beside its training: three nodes on this machine, TLS, keys.

    python benchmarks/deployment.py --page docs/results/deployment.md

all-MiniLM-L6-v2 on the built-in corpus, FedIT of rank 8; every client takes one step of one example a round, so that a
round is what the way to the clients and back costs. Measured by the rounds' own lines in metrics.jsonl, evaluation only
in the last one.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml
from stage import Deployment

from fedspan.data.builtin import corpus_file

NODES = ("clinic-a", "clinic-b", "clinic-c")
LIMIT = 5.0
"""Seconds of a round, as asked for."""


def divided(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """The corpus in as many files as nodes, and its labels."""
    source = corpus_file("builtin:patient-messages", "train", "data.train")
    rows = list(csv.DictReader(source.read_text(encoding="utf-8").splitlines()))
    found: dict[str, Path] = {}
    for number, id in enumerate(NODES):
        found[id] = folder / f"{id}.csv"
        with found[id].open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows[number :: len(NODES)])
    return found, sorted({row["label"] for row in rows})


def measure(
    rounds: int, federation: Mapping[str, Any] | None = None, *, insecure: bool = False
) -> tuple[list[float], int]:
    """Seconds of each round but the first and the last, and bytes that a client is sent and sends in one.

    Args:
        rounds: Number of rounds.
        federation: Further settings of the run's section ``federation``.
        insecure: Whether the deployment has neither TLS nor keys, and so no signatures.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        data, labels = divided(folder)
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
    taken = [after - before for before, after in pairwise(marks[:-1])]
    return taken, (traffic["down"] + traffic["up"]) // rounds // len(NODES)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=22)
    parser.add_argument("--page", type=Path, help="write the table to this file")
    args = parser.parse_args()
    taken, size = measure(args.rounds)
    middle = statistics.median(taken)
    lines = [
        "# What a round costs between machines",
        "",
        f"Three nodes on one machine, TLS and keys, all-MiniLM-L6-v2, one step of one example a client and round, "
        f"{size / 1e6:.1f} MB a client and round, {len(taken)} rounds.",
        "",
        f"Command: `python benchmarks/deployment.py --rounds {args.rounds}`  ",
        f"Date: {datetime.date.today()}. Machine: {platform.machine()}, {os.cpu_count()} cores, torch "
        f"{torch.__version__}, flwr 1.41.0.",
        "",
        "| seconds a round | measured | wanted |  |",
        "|---|---|---|---|",
        f"| median | {middle:.2f} | below {LIMIT:g} | {'pass' if middle < LIMIT else '**FAIL**'} |",
        f"| smallest | {min(taken):.2f} |  |  |",
        f"| largest | {max(taken):.2f} |  |  |",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.page:
        args.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
