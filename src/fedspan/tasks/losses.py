"""Losses of clients that share a batch, and the entries by which options of local training change a batch's loss.

Owners report losses to which no example contributes more than a bound (``bound_loss``): the loss of one example has no
upper bound, so no noise would hide it, and a model can make the loss of some examples huge on purpose.

Shapes: B examples of a batch, S targets of a batch (its examples or their tokens), K classes (labels or vocabulary), C
clients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from fedspan.errors import FedspanError
from fedspan.tasks.task import Task

LossOption = Literal["label_smoothing", "class_weights", "logit_adjustment"]
"""Options of ``training`` that change the loss of local training."""
CLASS_OPTIONS: tuple[LossOption, ...] = ("label_smoothing", "class_weights", "logit_adjustment")
"""The options that a cross-entropy of single labels takes."""

SMOOTHING = "label_smoothing"
"""Key of a training batch's share of each target that is spread over all classes, (B,), on the CPU."""
CLASS_WEIGHTS = "class_weights"
"""Key of the class weights of a training batch's examples, each those of its client, (B, K)."""
OFFSETS = "logit_offsets"
"""Key of a training batch's terms that are added to the logits before the cross-entropy, (B, K)."""


def get_logits(output: Any) -> Tensor:
    """Return the logits in a model's output: its ``logits``, or the output itself of a plain module."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        problem = f"its forward returns {type(output).__name__}"
        raise FedspanError("model", type(output).__name__, "a tensor, or an object with logits", problem=problem)
    return logits


def upcast(values: Tensor) -> Tensor:
    """Convert to float32 or better."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def average_by_client(values_B: Tensor, mask_CB: Tensor) -> Tensor:
    """Compute the mean over each client's examples, (C,).

    This is a product with a matrix of zeros and ones, not an indexed sum, which adds in no fixed order on a GPU.

    Args:
        values_B: One number for each of B examples (or tokens).
        mask_CB: 1 where an example belongs to a client, else 0.
    """
    mask_CB = mask_CB.to(values_B)
    return mask_CB @ values_B / mask_CB.sum(1)


def average_sums(predictions: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the mean loss of each example from predictions that begin with a sum of losses and a number of tokens.

    Returns:
        The means, and the numbers of tokens; both float64, (B,).
    """
    sums_B, counts_B = predictions[:, :2].double().unbind(1)
    return sums_B / counts_B.clamp(min=1), counts_B


def select_inputs(batch: Mapping[str, Tensor], *others: str) -> dict[str, Tensor]:
    """Return the entries of a batch that a model takes: all but labels and the entries of the loss.

    Args:
        *others: Keys of further entries that the model does not take.
    """
    left_out = {"labels", SMOOTHING, CLASS_WEIGHTS, OFFSETS, *others}
    return {key: value for key, value in batch.items() if key not in left_out}


def compute_cross_entropies(
    logits_SK: Tensor, targets_S: Tensor, batch: Mapping[str, Tensor], rows_S: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the cross-entropy of each target, with the smoothing and the class weights of a training batch.

    The sum of the first result over the sum of the second one is ``torch.nn.CrossEntropyLoss(weight=...,
    label_smoothing=...)``, and without weights Transformers' ``LabelSmoother``.

    Args:
        logits_SK: Logits of the targets, in float32 or better.
        targets_S: Class of each target.
        rows_S: Example of each target in the batch; None: a target for each example, in order.

    Returns:
        The cross-entropies, and what each adds to the divisor of their mean: the weight of its own class, or 1.
    """
    smoothing = get_smoothing(batch)
    if CLASS_WEIGHTS not in batch:
        losses_S = F.cross_entropy(logits_SK, targets_S, reduction="none", label_smoothing=smoothing)
        return losses_S, torch.ones_like(losses_S)
    weights_SK = batch[CLASS_WEIGHTS] if rows_S is None else batch[CLASS_WEIGHTS][rows_S]
    classes = weights_SK.shape[1]
    one_hot_SK = F.one_hot(targets_S, classes).to(weights_SK)
    smoothed_SK = weights_SK * ((1 - smoothing) * one_hot_SK + smoothing / classes)
    return -(smoothed_SK * logits_SK.log_softmax(1)).sum(1), (weights_SK * one_hot_SK).sum(1)


def average_cross_entropy(
    logits_SK: Tensor, targets_S: Tensor, batch: Mapping[str, Tensor], rows_S: Tensor | None = None
) -> Tensor:
    """Compute the mean of ``compute_cross_entropies``, a scalar; 0 without targets."""
    if CLASS_WEIGHTS not in batch and len(targets_S):
        return F.cross_entropy(logits_SK, targets_S, label_smoothing=get_smoothing(batch))
    losses_S, divisors_S = compute_cross_entropies(logits_SK, targets_S, batch, rows_S)
    return _divide(losses_S.sum(), divisors_S.sum())


def average_cross_entropy_by_client(
    logits_SK: Tensor, targets_S: Tensor, batch: Mapping[str, Tensor], mask_CB: Tensor, rows_S: Tensor | None = None
) -> Tensor:
    """Compute ``average_cross_entropy`` of each client's targets, (C,).

    Args:
        logits_SK: Logits of the targets, in float32 or better.
        targets_S: Class of each target.
        mask_CB: 1 where an example belongs to a client, else 0.
        rows_S: Example of each target in the batch; None: a target for each example, in order.
    """
    losses_S, divisors_S = compute_cross_entropies(logits_SK, targets_S, batch, rows_S)
    mask_CS = mask_CB.to(losses_S) if rows_S is None else mask_CB.to(losses_S)[:, rows_S]
    return _divide(mask_CS @ losses_S, mask_CS @ divisors_S)


def _divide(sums: Tensor, divisors: Tensor) -> Tensor:
    """Divide sums of losses; those without targets are 0."""
    return sums / torch.where(divisors > 0, divisors, 1.0)


def get_smoothing(batch: Mapping[str, Tensor]) -> float:
    """Return the share of each target of a batch that is spread over all classes."""
    return float(batch[SMOOTHING][0]) if SMOOTHING in batch else 0.0


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
    task: Task, metrics: Mapping[str, float], predictions: Tensor, examples: Any, indices: Sequence[int]
) -> dict[str, float]:
    """Return metrics with a loss that is the plain mean over examples of losses from 0 to the task's bound.

    Each example counts alike, however many tokens it has. Without losses of single examples there is no such loss.

    Args:
        metrics: The task's metrics over the examples.
        predictions: Predictions of the examples.
        examples: The data set that the indices point into.
    """
    others = {name: value for name, value in metrics.items() if name != "loss"}
    if not isinstance(task, BoundsExamples):
        return others  # whether there are metrics does not matter: one number that is none leaves no mean of all
    bound = get_loss_bound(task)
    losses_B, _ = task.compute_example_losses(predictions, examples, indices)
    return {"loss": float(losses_B.double().nan_to_num(nan=bound, posinf=bound).clamp(0, bound).mean()), **others}
