"""Default rates and rounds by task and method: the one place that states the factors by method.

A task's own rate is in its definition (``TaskDefinition.lr``).
``fedspan init`` writes them into a config, and ``training.lr: auto`` tests rates around them. They are for AdamW and
for a head that starts from pooled statistics: such a head is close to its place whatever the number of classes, so it
trains with the adapters' rate. The factors by method are ratios of the best rates in a search on Banking77, from a
random head, with adapters in the last two layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedspan.tasks.registry import get_task


@dataclass(frozen=True)
class TrainingDefaults:
    """Default training settings of a run."""

    lr: float
    """Learning rate of what the method trains."""
    logit_adjustment: float
    """Strength of the adjustment of logits to a client's own classes."""
    batch_size: int = 16
    local_epochs: int = 1
    """Passes over a client's examples in a round."""
    rounds: int = 12
    final_rounds: int = 2
    """Rounds after the best one on all of a client's examples."""


FAST = 3.0
"""Factor on a text task's rate where only the last layers have adapters."""
FACTORS: Mapping[str, float] = {"fedavg": 0.25, "ffa-lora": 2.5}
"""Factors on the task's rate, by method. Whole weights need a smaller rate; with one trained factor, whose average is
exact, a larger one is best."""


def get_training_defaults(task: str, method: str) -> TrainingDefaults:
    """Return the default settings of a run.

    Args:
        method: Registry key of the method; a method without an entry has the rate of FedIT.
    """
    definition = get_task(task)
    return TrainingDefaults(
        lr=definition.lr * FACTORS.get(method, 1.0),
        logit_adjustment=1.0 if "logit_adjustment" in definition.loss_options else 0.0,
    )
