"""Interfaces that an engine and a run expect of a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    import datasets

__all__ = ["Examples", "RunTask", "Task"]


class Examples(Protocol):
    """Encoded examples, by index."""

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> np.ndarray:
        """Cost of each example (tokens), for batching by length; int64, (examples,)."""
        ...


class Task(Protocol):
    """Interface that an engine expects of a kind of learning problem; stateless apart from constructor arguments."""

    def batch(self, examples: Any, indices: Sequence[int], device: torch.device) -> Mapping[str, Tensor]:
        """Collate some examples into a batch."""
        ...

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the mean loss over the batch's examples, a scalar."""
        ...

    def losses(self, model: nn.Module, batch: Mapping[str, Tensor], mask_CB: Tensor) -> Tensor:
        """Compute ``loss`` for several clients' examples that share a batch, (C,), each over its own examples.

        Args:
            model: The model.
            batch: A batch of B examples.
            mask_CB: 1 where an example belongs to a client, else 0, in the loss's number format; an example may
                belong to no client.
        """
        ...

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor], *, generate: bool = False) -> Tensor:
        """Predict one row per example (logits, values); with ``generate``, causal models also generate an answer."""
        ...

    def metrics(self, predictions: Tensor, examples: Any, indices: Sequence[int]) -> dict[str, float]:
        """Compute ``loss`` and the task's other metrics over the given examples; undefined values are left out."""
        ...


class RunTask(Task, Protocol):
    """Further interface that a run expects: conversion of rows to examples, and of predictions to readable answers."""

    @property
    def metric(self) -> str:
        """Metric (of `fedspan.tasks.metrics`) by which rounds and settings are compared."""
        ...

    def encode(self, dataset: datasets.Dataset) -> Any:
        """Encode a data set as the task's own kind of ``Examples``."""
        ...

    def remarks(self, examples: Any) -> tuple[str, ...]:
        """Return remarks for the user on encoded examples, one sentence each, such as what was cut."""
        ...

    def answers(self, predictions: Tensor) -> list[str]:
        """Convert predictions (with generated text) to readable answers: a label, a number, a text."""
        ...

    def truths(self, examples: Any, indices: Sequence[int]) -> list[str]:
        """Return the correct answers, in the form of ``answers``."""
        ...
