"""Losses to which no example contributes more than a bound, for owners that report them to others.

The loss of one example has no upper bound: a model that makes the loss of some examples huge on purpose writes their
number into the mean, however coarsely that is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedspan.tasks.task import Task

__all__ = [
    "LOSS_BOUND",
    "BoundsExamples",
    "bound_loss",
    "compute_guess_bound",
    "compute_guess_entropy",
    "compute_guess_loss",
    "get_loss_bound",
]

LOSS_BOUND = 6.0
"""Bound of the loss of a task without a ``loss_bound``. For text it is a perplexity of 403."""


@runtime_checkable
class BoundsExamples(Protocol):
    """A task whose loss is a weighted mean over examples."""

    def compute_example_losses(
        self, predictions: Tensor, examples: Any, indices: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss of each example, and its weight in the mean; both (examples,)."""
        ...


def compute_guess_entropy(choices: int) -> float:
    """Return the cross-entropy of a uniform guess among some choices, at least two."""
    return math.log(max(choices, 2))


def compute_guess_bound(classes: int) -> float:
    """Return twice the cross-entropy of a uniform guess among some classes, at least two.

    Half of it would hide as many examples, because the steps of the rounded mean are a multiple of what one example
    counts. It selects rounds about as well (docs/results/reported-losses.md), but no loss above a guess would show.
    """
    return 2 * compute_guess_entropy(classes)


def compute_guess_loss(task: Task) -> float | None:
    """Return the loss of a model that guesses, the task's ``guess_loss`` or half of its bound; None: unknown."""
    bound = getattr(task, "loss_bound", None)
    return getattr(task, "guess_loss", None if bound is None else float(bound) / 2)


def get_loss_bound(task: Task) -> float:
    """Return the bound of a task's loss: its ``loss_bound``, or the common one."""
    return float(getattr(task, "loss_bound", LOSS_BOUND))


def bound_loss(
    task: Task, metrics: Mapping[str, float], predictions: Tensor | None, examples: Any, indices: Sequence[int]
) -> dict[str, float]:
    """Return metrics with a loss to which each example contributes from 0 to the task's bound.

    The mean itself is bounded for tasks that do not have the losses of single examples.

    Args:
        task: The task.
        metrics: The task's metrics over the examples.
        predictions: Predictions of the examples; None: there are none, as with a trainer of a user's own.
        examples: The data set that the indices point into.
        indices: The examples.
    """
    if "loss" not in metrics:
        return dict(metrics)
    bound = get_loss_bound(task)
    losses_B, weights_B = torch.tensor([metrics["loss"]]), torch.ones(1)
    if predictions is not None and isinstance(task, BoundsExamples):
        losses_B, weights_B = task.compute_example_losses(predictions, examples, indices)
    bounded_B = losses_B.double().nan_to_num(nan=bound, posinf=bound).clamp(0, bound)
    total = float((bounded_B * weights_B).sum())
    return {**metrics, "loss": total / max(1.0, float(weights_B.double().sum()))}
