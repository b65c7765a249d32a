"""What an engine asks of a task: batches, a loss, predictions, metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Examples", "Task"]


class Examples(Protocol):
    """Encoded examples, by index."""

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> np.ndarray:
        """Cost of each example (tokens), for batching by length; int64, (examples,)."""
        ...


class Task(Protocol):
    """A kind of learning problem. Stateless apart from what it was built with (tokenizer, labels)."""

    def batch(self, examples: Any, indices: Sequence[int], device: torch.device) -> Mapping[str, Tensor]:
        """The collated batch of some examples."""
        ...

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """The mean loss over the batch's examples, a scalar."""
        ...

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """One row per example (logits, values)."""
        ...

    def metrics(self, predictions: Tensor, examples: Any, indices: Sequence[int]) -> dict[str, float]:
        """``loss``, ``accuracy`` and what else the task measures, over the given examples."""
        ...
