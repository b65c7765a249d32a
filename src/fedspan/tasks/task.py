"""What an engine and a run ask of a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import datasets
import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Examples", "RunTask", "Task"]


class Examples(Protocol):
    """Encoded examples, by index."""

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> np.ndarray:
        """Cost of each example (tokens), for batching by length; int64, (examples,)."""
        ...


class Task(Protocol):
    """What an engine asks of a kind of learning problem. Stateless apart from what it was built with."""

    def batch(self, examples: Any, indices: Sequence[int], device: torch.device) -> Mapping[str, Tensor]:
        """The collated batch of some examples."""
        ...

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """The mean loss over the batch's examples, a scalar."""
        ...

    def losses(self, model: nn.Module, batch: Mapping[str, Tensor], members_CB: Tensor) -> Tensor:
        """``loss`` of several clients' examples that share a batch, (C,), each over its own examples.

        Args:
            model: the model.
            batch: of B examples.
            members_CB: 1 where an example is a client's, else 0, in the loss's number format; an example may be
                nobody's.
        """
        ...

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor], *, thorough: bool = False) -> Tensor:
        """One row per example (logits, values); ``thorough`` adds what costs much (generated text)."""
        ...

    def metrics(self, predictions: Tensor, examples: Any, indices: Sequence[int]) -> dict[str, float]:
        """``loss`` and what else the task measures, over the given examples; what has no value here is left out."""
        ...


class RunTask(Task, Protocol):
    """What a run asks beside that: from rows to examples, and from predictions to what people read."""

    @property
    def metric(self) -> str:
        """The metric (of `fedspan.tasks.metrics`) by which rounds and settings are compared."""
        ...

    def encode(self, dataset: datasets.Dataset) -> Any:
        """The examples of a data set, as the task's own kind of ``Examples``."""
        ...

    def remarks(self, examples: Any) -> tuple[str, ...]:
        """What a user should know of encoded examples, each a sentence: what was cut."""
        ...

    def answers(self, predictions: Tensor) -> list[str]:
        """Thorough predictions as people read them: a label, a number, a text."""
        ...

    def truths(self, examples: Any, indices: Sequence[int]) -> list[str]:
        """What would have been right, in the form of ``answers``."""
        ...
