"""Heads before any training: accuracy and cross-entropy on Banking77 by pooling and kind of start.

    python benchmarks/head_start.py --data PATH/banking77

Every fifth training example, ten clients by a Dirichlet distribution of 0.3, every fourth test example. Statistics go
through the run's own exchange, so bytes are those of the ledger.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from pathlib import Path
from typing import Any


def sample(source: Path, target: Path, step: int) -> str:
    """Every ``step``-th row of a csv file."""
    with source.open(newline="", encoding="utf-8") as file:
        head, *rows = list(csv.reader(file))
    with target.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([head, *rows[::step]])
    return str(target)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.csv and test.csv")
    parser.add_argument("--model", default="builtin:all-minilm-l6-v2")
    args = parser.parse_args()
    from fedspan.config import parse_config
    from fedspan.runs.head_setup import begin
    from fedspan.runs.setup import prepare

    print("| pooling | head_init | accuracy, % | cross-entropy | sent by a client, kB |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        data = {
            "train": sample(args.data / "train.csv", place / "train.csv", 5),
            "test": sample(args.data / "test.csv", place / "test.csv", 4),
            "text": "text",
            "label": "category",
        }
        for pooling in ("auto", "stock"):
            for kind in ("class-means", "lda"):
                values: dict[str, Any] = {
                    "model": {"name": args.model, "pooling": pooling, "head_init": kind, "max_length": 64},
                    "data": data,
                    "partition": {
                        "partitioner": "dirichlet",
                        "alpha": 0.3,
                        "clients": 10,
                        "validation": 0.0,
                        "test": 0.0,
                    },
                }
                prepared = prepare(parse_config(values))
                progress = begin(prepared.federation, prepared.head)
                assert prepared.test is not None
                scores = prepared.evaluator.heldout(progress, prepared.test)["global"]
                sent = {one.bytes for one in prepared.federation.beside().transfers if one.direction == "up"}
                cells = (
                    pooling,
                    kind,
                    f"{100 * scores['accuracy']:.1f}",
                    f"{scores['loss']:.3f}",
                    f"{max(sent) / 1e3:.0f}",
                )
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
