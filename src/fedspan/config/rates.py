"""Default rates and rounds by task, method and number of classes: the one place that states them.

``fedspan init`` writes them into a config, and ``training.lr: auto`` tests rates around them. They were chosen with
AdamW on other data sets than those that they are judged on; docs/results/defaults.md has the table and the command.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedspan.data.columns import TaskName
from fedspan.tasks.metrics import CLASSIFIERS

__all__ = ["FACTORS", "TrainingDefaults", "training_defaults"]


@dataclass(frozen=True)
class TrainingDefaults:
    """Default training settings of a run.

    Args:
        lr: Learning rate of what the method trains.
        extras_lr_scale: Learning rate of the head, as a multiple of ``lr``.
        batch_size: Number of examples of a pass.
        local_epochs: Passes over a client's examples in a round.
        rounds: Maximum number of rounds.
        early_stopping: Rounds without a better validation score after which the run stops.
        logit_adjustment: Strength of the adjustment of logits to a client's own classes.
    """

    lr: float
    extras_lr_scale: float
    batch_size: int
    local_epochs: int
    rounds: int
    early_stopping: int
    logit_adjustment: float


_TASK_RATES: Mapping[TaskName, float] = {
    "sequence-classification": 2e-3,
    "regression": 2e-3,
    "image-classification": 2e-3,
    "causal-lm": 2e-4,
}
"""Rates of a method that trains both factors of a pair."""
FACTORS: Mapping[str, float] = {
    "fedavg": 0.1,
    "fedhm": 0.5,
    "fedgalore": 0.5,
    "fed-sb": 2.0,
    "fedsvd": 2.0,
    "ffa-lora": 4.0,
    "flora": 2.0,
    "rolora": 2.0,
}
"""Factors on the task's rate. Methods that train one factor at a time, whose averages are exact, bear larger rates;
whole weights need smaller ones."""


def training_defaults(task: TaskName, method: str, classes: int | None = None) -> TrainingDefaults:
    """Return the default settings of a run.

    Args:
        task: The learning task.
        method: Registry key of the method; a method without an entry has the rate of FedIT.
        classes: Number of classes of a classifier; None: not known.
    """
    lr = _TASK_RATES[task] * FACTORS.get(method, 1.0)
    classifies = task in CLASSIFIERS
    return TrainingDefaults(
        lr=lr,
        extras_lr_scale=1.0,
        batch_size=16,
        local_epochs=1,
        rounds=30 if task != "causal-lm" else 20,
        early_stopping=5,
        logit_adjustment=1.0 if classifies else 0.0,
    )
