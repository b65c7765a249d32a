"""Losses to which no example contributes more than a bound, for owners that report them to others.

The loss of one example has no upper bound, so no noise would hide it: a model can make the loss of some examples huge
on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from fedspan.tasks.task import Task

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

    The noise of the mean that hides an example is as large as what it counts; below a guess no bad model would show.
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
    """Return metrics with a loss that is the plain mean over examples of losses from 0 to the task's bound.

    Each example counts alike, however many tokens it has. Without losses of single examples there is no such loss.

    Args:
        task: The task.
        metrics: The task's metrics over the examples.
        predictions: Predictions of the examples; None: there are none, as with a trainer of a user's own.
        examples: The data set that the indices point into.
        indices: The examples.
    """
    others = {name: value for name, value in metrics.items() if name != "loss"}
    if predictions is None or not isinstance(task, BoundsExamples) or "loss" not in metrics:
        return others
    bound = get_loss_bound(task)
    losses_B, _ = task.compute_example_losses(predictions, examples, indices)
    return {"loss": float(losses_B.double().nan_to_num(nan=bound, posinf=bound).clamp(0, bound).mean()), **others}
