"""Interfaces that an engine and a run expect of a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from fedspan.errors import FedspanError

if TYPE_CHECKING:
    import datasets


class Examples(Protocol):
    """Encoded examples, by index."""

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> np.ndarray:
        """Cost of each example (tokens), for batching by length; int64, (examples,)."""
        ...


class Task(Protocol):
    """Interface that an engine expects of a kind of learning problem; stateless apart from constructor arguments."""

    def collate(self, examples: Any, indices: Sequence[int], device: torch.device) -> Mapping[str, Tensor]:
        """Collate some examples into a batch."""
        ...

    def compute_loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the mean loss over the batch's examples, a scalar."""
        ...

    def compute_client_losses(self, model: nn.Module, batch: Mapping[str, Tensor], mask_CB: Tensor) -> Tensor:
        """Compute ``compute_loss`` of each client whose examples share a batch, over its own examples, (C,).

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

    def compute_metrics(self, predictions: Tensor, examples: Any, indices: Sequence[int]) -> dict[str, float]:
        """Compute ``loss`` and the task's other metrics over the given examples; undefined values are left out."""
        ...


class RunTask(Task, Protocol):
    """Further interface that a run expects: conversion of rows to examples, and of predictions to readable texts."""

    @property
    def metric(self) -> str:
        """Metric (of `fedspan.tasks.metrics`) by which rounds and settings are compared."""
        ...

    def encode(self, dataset: datasets.Dataset) -> Any:
        """Encode a data set as the task's own kind of ``Examples``.

        Raises:
            FedspanError: If the processor is missing or unfit, or the options or an example cannot be used.
        """
        ...

    def describe_examples(self, examples: Any) -> tuple[str, ...]:
        """Return notes on encoded examples for the user, one sentence each, such as how many were truncated."""
        ...

    def decode_predictions(self, predictions: Tensor) -> list[str]:
        """Convert predictions (with generated text) to readable texts: a label, a number, an answer."""
        ...

    def decode_targets(self, examples: Any, indices: Sequence[int]) -> list[str]:
        """Return the true targets of examples as texts, in the form of ``decode_predictions``."""
        ...


@runtime_checkable
class LabelsWords(Protocol):
    """A task with a label for each word, whose features are those of words."""

    def list_classes(self, examples: Any, indices: np.ndarray) -> np.ndarray:
        """Return the labels of the words of some examples, one example after another, int64, (words,)."""
        ...

    def select_words(self, values_BTD: Tensor, batch: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the values of each example's labeled words, (words, D), from those of all tokens of a batch."""
        ...


@runtime_checkable
class _HasIndicators(Protocol):
    def encode_labels(self, examples: Any, indices: Sequence[int]) -> np.ndarray: ...


def get_head_targets(task: Task, examples: Any, indices: np.ndarray) -> np.ndarray:
    """Return what the outputs of a head are fitted to, for statistics of its features.

    Returns:
        The label or number of each example, (examples,); of a task that labels words, that of each word, (words,); of
        one with any number of labels, 1 where an example has it, (examples, labels).

    Raises:
        FedspanError: If the examples of a task of the user's own have no ``labels``.
    """
    if isinstance(task, LabelsWords):
        return task.list_classes(examples, indices)
    if isinstance(task, _HasIndicators):
        return task.encode_labels(examples, indices.tolist())
    return get_labels(examples, indices)


def get_labels(examples: Any, indices: np.ndarray) -> np.ndarray:
    """Return the target of each of some examples: the index of its label, int64, or its number; (examples,).

    Raises:
        FedspanError: If the examples of a task of the user's own have no ``labels``.
    """
    labels = getattr(examples, "labels", None)
    if not isinstance(labels, np.ndarray):
        problem = f"{type(examples).__name__}, the encoded examples of this task, has no array `labels`"
        raise FedspanError("task", type(examples).__name__, "one label for each example, (examples,)", problem=problem)
    return labels[indices]
