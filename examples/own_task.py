"""A task of your own in one file: waiting times, predicted by their median instead of their mean.

    python examples/own_task.py

A few long waits dominate a squared error. The task ``median-regression`` minimizes the absolute error, by which its
rounds are compared; encoding, columns and predictions are those of the built-in regression. The script prints both
tasks' mean absolute error on another hospital's visits.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from torch import Tensor, nn

import fedspan
from fedspan.data.config import DataConfig
from fedspan.tasks.encoding import EncodedText
from fedspan.tasks.losses import average_by_client, upcast
from fedspan.tasks.metrics import Metric
from fedspan.tasks.regression import REGRESSION, Regression
from fedspan.tasks.settings import TaskSettings

MINUTES = {"chest pain": 10, "high fever": 25, "broken wrist": 45, "sore throat": 90, "new prescription": 140}
"""Complaints with their usual waiting time."""


class MedianRegression(Regression):
    """Regression by the absolute error."""

    def _errors(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        values_B = upcast(self.predict(model, batch))[:, 0]
        return (values_B - batch["labels"].to(values_B)).abs()

    def compute_loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the mean absolute error of a batch."""
        return self._errors(model, batch).mean()

    def compute_client_losses(self, model: nn.Module, batch: Mapping[str, Tensor], mask_CB: Tensor) -> Tensor:
        """Compute the mean absolute error of each client's examples, (C,)."""
        return average_by_client(self._errors(model, batch), mask_CB)

    def compute_example_losses(
        self, predictions: Tensor, examples: EncodedText, indices: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Compute the absolute error of each example, from which nodes report a loss, with equal weights."""
        squares_B, weights_B = super().compute_example_losses(predictions, examples, indices)
        return squares_B.sqrt(), weights_B

    def compute_metrics(self, predictions: Tensor, examples: EncodedText, indices: Sequence[int]) -> dict[str, float]:
        """Compute regression's metrics and the mean absolute error."""
        error = float(self.compute_example_losses(predictions, examples, indices)[0].mean())
        return {**super().compute_metrics(predictions, examples, indices), "loss": error, "absolute_error": error}


def build(tokenizer: Any, settings: TaskSettings, data: DataConfig | None) -> MedianRegression:
    """Build the task for a run (``data`` is its config's section) or for a trained model (``data`` is None)."""
    return MedianRegression(tokenizer, settings.max_length, settings.metric)


MEDIAN_REGRESSION = replace(
    REGRESSION,
    name="median-regression",
    title="the median of a number for a text",
    build=build,
    metrics=("absolute_error", "pearson", "spearman", "loss"),
    custom_metrics={"absolute_error": Metric("absolute error", False, maximum=1e15)},
    summary_metrics=("pearson",),
)


def make_visits(hospital: int, count: int) -> list[dict[str, Any]]:
    """Make visits of one hospital; one wait in ten is ten times as long."""
    rng = random.Random(hospital)
    visits: list[dict[str, Any]] = []
    for _ in range(count):
        complaint = rng.choice(list(MINUTES))
        minutes = MINUTES[complaint] * rng.uniform(0.8, 1.2) * (10 if rng.random() < 0.1 else 1)
        visits.append({"text": f"patient {rng.randrange(100)} with {complaint}", "label": round(minutes / 60, 3)})
    return visits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:all-minilm-l6-v2", help="an encoder: hub id or folder")
    parser.add_argument("--layer", type=int, default=5, help="the layer to adapt; MiniLM's last one is 5")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path, help="left out: runs/own_task, or runs/own_task-smoke")
    parser.add_argument("--smoke", action="store_true", help="a few seconds: one round of 40 visits a hospital")
    args = parser.parse_args()
    args.out = args.out or Path("runs/own_task-smoke" if args.smoke else "runs/own_task")

    fedspan.register_task(MEDIAN_REGRESSION)
    visits = {f"hospital-{number}": make_visits(number, 40 if args.smoke else 240) for number in range(5)}
    test = make_visits(5, 40 if args.smoke else 400)
    config: dict[str, Any] = {
        "model": {"name": args.model, "target_modules": ["query", "value"], "layers_to_transform": args.layer},
        "federation": {"rounds": 1 if args.smoke else args.rounds},
        "training": {"lr": 3e-3, "batch_size": 16},
    }
    for task in ("regression", "median-regression"):
        run = args.out / task
        report = fedspan.run({**config, "task": task}, run, data={"train": visits, "test": test})
        hours = fedspan.predict(run, [visit["text"] for visit in test])
        error = mean(abs(predicted - visit["label"]) for predicted, visit in zip(hours, test, strict=True))
        pearson = report.scores["test"].get("pearson", 0.0)
        print(f"{task}: Pearson {pearson:.2f}, mean absolute error {60 * error:.0f} min")


if __name__ == "__main__":
    main()
