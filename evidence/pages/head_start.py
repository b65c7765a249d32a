"""Heads before any training by pooling and kind of start.

    python -m evidence.pages.head_start --data PATH/data

The tables have accuracy and cross-entropy on Banking77: every fifth training example, ten clients by a Dirichlet
distribution of 0.3, every fourth test example. Statistics go through the run's own exchange, so bytes are those of the
ledger. A second table has the same head where every client leaves out classes with few examples
(``limits.class_examples`` of nodes).
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from fedspan.assembly.run import Prepared


def sample(source: Path, target: Path, step: int) -> str:
    """Every ``step``-th row of a csv file."""
    with source.open(newline="", encoding="utf-8") as file:
        head, *rows = list(csv.reader(file))
    with target.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([head, *rows[::step]])
    return str(target)


def build_values(data: dict[str, str], model: str, pooling: str, kind: str, clients: int) -> dict[str, Any]:
    """A run whose clients differ in their classes, as plain values."""
    part = {"partitioner": "dirichlet", "alpha": 0.3, "clients": clients, "validation": 0.0, "test": 0.0}
    options = {"name": model, "pooling": pooling, "head_init": kind, "max_length": 64}
    return {"model": options, "data": data, "partition": part}


def measure_start(prepared: Prepared) -> tuple[str, str, int]:
    """Accuracy (%) and cross-entropy of the start, and the bytes of the largest reply."""
    from fedspan.assembly.head import begin

    progress = begin(prepared.federation, prepared.head)
    assert prepared.test is not None
    scores = prepared.evaluator.evaluate_heldout(progress, prepared.test)["global"]
    sent = max(one.bytes for one in prepared.federation.pop_events().transfers if one.direction == "up")
    return f"{100 * scores['accuracy']:.1f}", f"{scores['loss']:.3f}", sent


def measure_counted(prepared: Prepared, least: int) -> tuple[float, int]:
    """Share of the examples and number of the classes that at least one client counts."""
    labels, kept, classes = prepared.train.labels, 0, set[int]()  # type: ignore[attr-defined]
    for client_data in prepared.federation.clients.values():
        numbers = np.bincount(labels[client_data.train], minlength=len(prepared.labels))
        kept += int(numbers[numbers >= least].sum())
        classes |= set(np.flatnonzero(numbers >= least).tolist())
    return kept / len(labels), len(classes)


def measure_starts(args: argparse.Namespace) -> None:
    """Print the tables of heads before any training."""
    from fedspan.assembly.run import prepare
    from fedspan.clients.statistics import StatisticsLimits
    from fedspan.config import parse_config
    from fedspan.transports.in_process import InProcess

    with tempfile.TemporaryDirectory() as folder:
        run_folder = Path(folder)
        data = {
            "train": sample(args.data / "banking77" / "train.csv", run_folder / "train.csv", 5),
            "test": sample(args.data / "banking77" / "test.csv", run_folder / "test.csv", 4),
            "text": "text",
            "label": "category",
        }
        print("| pooling | head_init | accuracy, % | cross-entropy | sent by a client, kB |\n|---|---|---|---|---|")
        for pooling in ("auto", "stock"):
            for kind in ("class-means", "lda"):
                prepared = prepare(parse_config(build_values(data, args.model, pooling, kind, 10)))
                accuracy, loss, sent = measure_start(prepared)
                print(f"| {pooling} | {kind} | {accuracy} | {loss} | {sent / 1e3:.0f} |", flush=True)
        print("\n| clients | class_examples | examples counted, % | classes | accuracy, % | cross-entropy |")
        print("|---|---|---|---|---|---|")
        for clients in (10, 50):
            prepared = prepare(parse_config(build_values(data, args.model, "auto", "lda", clients)))
            assert isinstance(prepared.federation.transport, InProcess)
            for least in (1, 2, 3, 5, 10):
                prepared.federation.transport.host.limits = StatisticsLimits(class_examples=least)
                share, classes = measure_counted(prepared, least)
                accuracy, loss, _ = measure_start(prepared)
                print(f"| {clients} | {least} | {100 * share:.0f} | {classes} | {accuracy} | {loss} |", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--model", default="builtin:all-minilm-l6-v2")
    measure_starts(parser.parse_args())


if __name__ == "__main__":
    main()
