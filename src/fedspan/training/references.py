"""Outputs of the reference model, computed once for each example.

A task with ``compute_reference`` compares the model that trains with the reference: the pretrained model, which is the
base before the first round, without adapters. Methods that change the base (FLoRA, full-rank methods) do not change the
reference. Its numbers are written to the examples' own ``reference``, so batches contain them in every engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from fedspan.core.base import BaseUpdate
from fedspan.models.adapted import AdaptedModel
from fedspan.models.calls import enter_evaluation
from fedspan.tasks.task import Examples, Task
from fedspan.training.batching import split_evaluation_batches
from fedspan.training.jobs import NotFiniteError, is_explained
from fedspan.training.stages import Stages


class ReferenceTask(Task, Protocol):
    """A task that compares the model with the reference.

    Its examples have ``reference``, float64, (examples, K), NaN where nothing is computed yet.
    """

    def compute_reference(self, model: nn.Module, batch: Any) -> Tensor:
        """Compute the numbers of the reference model for a batch's examples, (B, K)."""
        ...


def has_reference(task: Task) -> bool:
    """Check whether a task compares the model with the reference."""
    return hasattr(task, "compute_reference")


def fill_reference(
    task: Task,
    model: nn.Module,
    examples: Examples,
    indices: np.ndarray,
    device: torch.device,
    batch_size: int,
    on_done: Callable[[int], None] | None = None,
    *,
    survives: bool = False,
) -> None:
    """Compute the reference of some examples, in batches of similar length.

    Args:
        examples: The data set; its ``reference`` is filled.
        indices: The examples, (examples,).
        on_done: Called with the number of examples of every batch that is done.
        survives: Whether an example on which the model fails gets infinite numbers, so that its loss is not finite.
    """
    values: np.ndarray = cast(Any, examples).reference

    def fill(batch: np.ndarray) -> None:
        try:
            rows = cast(ReferenceTask, task).compute_reference(model, task.collate(examples, batch.tolist(), device))
            values[batch] = rows.cpu().double().numpy()
            if np.isnan(values[batch]).any():
                problem = "the pretrained model computes NaN"
                raise NotFiniteError("model.name", "NaN", "a model or model.dtype without it", problem=problem)
        except Exception as error:
            if is_explained(error) or not survives:
                raise
            values[batch] = np.inf
            for number in range(len(batch) if len(batch) > 1 else 0):
                fill(batch[number : number + 1])

    for batch in split_evaluation_batches(indices, examples.lengths, batch_size):
        fill(batch)
        if on_done is not None:
            on_done(len(batch))


def copy_reference(task: Task, examples: Examples) -> Examples:
    """Return examples with a reference of their own to fill: arrays that processes share are read-only.

    Args:
        task: The learning problem; without a reference, the examples are returned as they are.
    """
    if not has_reference(task):
        return examples
    shared = cast(Any, examples)
    return replace(shared, reference=shared.reference.copy())


class References:
    """Computes the reference of examples with an engine's own model.

    Args:
        task: The learning problem; nothing is computed unless it has a reference.
    """

    def __init__(self, adapted: AdaptedModel, task: Task, stages: Stages, batch_size: int) -> None:
        self.adapted, self.task, self.stages, self.batch_size = adapted, task, stages, batch_size

    @torch.no_grad()
    def ensure(self, examples: Examples, parts: Sequence[np.ndarray], *, survives: bool = False) -> None:
        """Compute what is missing of some examples; the model has its base, but no job, afterwards.

        No other thread may use the model or a replica of it: they share weights, which are those of the pretrained
        model meanwhile.

        Args:
            parts: Indices of the examples, those of each client's part separately: the last bits may depend on which
                examples are computed together.
            survives: As for ``fill_reference``.
        """
        if not has_reference(self.task):
            return
        values: np.ndarray = cast(Any, examples).reference
        missing = [own for part in parts if len(own := np.unique(part)[np.isnan(values[np.unique(part)]).any(1)])]
        if not missing:
            return
        adapted, base = self.adapted, self.adapted.base
        with self.stages.stage("reference", sum(map(len, missing))):
            adapted.set_base(BaseUpdate())
            try:
                adapted.install({}, {}, frozenset())
                with enter_evaluation(adapted.model):
                    for part in missing:
                        fill_reference(
                            self.task,
                            adapted.model,
                            examples,
                            part,
                            adapted.device,
                            self.batch_size,
                            lambda count: self.stages.advance("reference", count),
                            survives=survives,
                        )
            finally:
                adapted.set_base(base)
