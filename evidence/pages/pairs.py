"""Labels of pairs of texts: what the largest class, scikit-learn and the config of ``fedspan init`` reach.

    python -m evidence.pages.pairs --data PATH/data

Accuracy with 800 training rows, drawn by seed, on the same test rows, at most 400. Finished results are not rerun.
"""

import argparse
import csv
import json
from pathlib import Path

import numpy as np
import torch

from evidence.pages.outside_reference import PENALTIES, Cells, TextEncoder, encode_all, fit_regression, format_interval
from evidence.pages.subsets import Cell, config_of, write_data

NAMES = ("MRPC", "QNLI", "RTE")
FEATURES = {
    "u, v, |u - v|": lambda u, v: torch.cat([u, v, (u - v).abs()], 1),
    "|u - v|, u * v": lambda u, v: torch.cat([(u - v).abs(), u * v], 1),
}


def measure_references(cell: Cell, args: argparse.Namespace) -> dict[str, float]:
    """Test accuracy of the largest class, and of logistic regression on frozen features."""
    parts = [list(csv.DictReader(path.open(newline="", encoding="utf-8"))) for path in write_data(cell, args)]
    vectors = [[encode_all(TextEncoder(), [row[n] for row in part]) for n in list(part[0])[:2]] for part in parts]
    labels, expected = (np.array([row["label"] for row in part]) for part in parts)
    classes, counts = np.unique(labels, return_counts=True)
    scores, held = {"largest class": float((expected == classes[counts.argmax()]).mean())}, len(labels) // 10
    for title, combine in FEATURES.items():
        train, test = (combine(*part) for part in vectors)
        fitted = [fit_regression(train[held:], labels[held:], penalty) for penalty in PENALTIES]
        best = np.argmax([one.score(train[:held].numpy(), labels[:held]) for one in fitted])
        regression = fit_regression(train, labels, PENALTIES[best])
        scores[f"logistic regression on frozen {title}"] = float(regression.score(test.numpy(), expected))
    return scores


def measure_run(cell: Cell, args: argparse.Namespace) -> dict[str, float]:
    """Test accuracy of a run with the config of ``fedspan init``."""
    import fedspan

    folder = args.out / args.title / cell.stem
    fedspan.run(config_of(cell, args).model_copy(update={"baselines": []}), folder, resume=True)
    return {args.title: json.loads((folder / "report.json").read_text())["scores"]["test"]["accuracy"]}


def main() -> None:
    """Measure what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--out", type=Path, default=Path("runs/pairs"), help="folder of the results")
    parser.add_argument("--title", default="fedspan", help="row of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    args = parser.parse_args()
    (args.out / args.title).mkdir(parents=True, exist_ok=True)
    cells, rows = Cells(args.out / "cells.json"), dict[str, dict[str, list[float]]]()
    for measure, kind in ((measure_references, "references"), (measure_run, args.title)):
        for cell in (Cell(name, "IID", seed) for seed in args.seeds for name in NAMES):
            scores = cells.get(f"{cell.stem} | {kind}", lambda cell=cell, measure=measure: measure(cell, args))
            for title, score in scores.items():
                rows.setdefault(title, {}).setdefault(cell.name, []).append(score)
    print(f"| accuracy, % | {' | '.join(NAMES)} |\n|---|{'---:|' * len(NAMES)}")
    for title, by_name in rows.items():
        print(f"| {title} | {' | '.join(format_interval(by_name[name]) for name in NAMES)} |")


if __name__ == "__main__":
    main()
