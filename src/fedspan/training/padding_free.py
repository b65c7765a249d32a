"""Training without padding, where a model supports it and where it pays."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedspan.models.adapted import AdaptedModel
from fedspan.models.calls import evaluating
from fedspan.models.layout import Padded, TokenLayout
from fedspan.models.precision import tolerance
from fedspan.models.unpadded import Unpadded
from fedspan.tasks.task import Examples, Task

__all__ = ["Padding"]

_WORTH = 0.08
"""Minimum share of padding in a batch: moving the tokens takes time, too."""
_SAMPLE = 4
"""Number of examples on which a model is verified."""


class Padding:
    """Decides whether forward passes of an engine run without padding, and runs them so.

    Args:
        adapted: The model.
        task: The learning problem.
        why_not: The reason why all batches are to be padded; None: it depends on the model.
    """

    def __init__(self, adapted: AdaptedModel, task: Task, why_not: str | None) -> None:
        self.adapted, self.task = adapted, task
        self._state = _State(why_not)
        self._own: Unpadded | None = None

    def replica(self, adapted: AdaptedModel) -> Padding:
        """Return the same object for a replica of the model, in another thread."""
        made = copy.copy(self)
        made.adapted, made._own = adapted, None
        return made

    @property
    def why_not(self) -> str | None:
        """The reason why batches are padded; None if they are not, or if no data set has been seen."""
        return self._state.why_not

    def ensure(self, examples: Examples) -> None:
        """Verify the model on the first data set that it gets. This installs the bare base."""
        with self._state.lock:
            if not self._state.tried and self._state.why_not is None:
                try:
                    self._own = Unpadded(self.adapted)
                    self._verify(self._own, examples)
                except Padded as error:
                    self._state.why_not = str(error)
            self._state.tried = True
        if self._own is None and self._state.why_not is None:
            self._own = Unpadded(self.adapted)

    @property
    def possible(self) -> bool:
        """Whether batches can run without padding, as far as is known."""
        return self._own is not None and self._state.why_not is None

    def remove_padding(
        self, batch: Mapping[str, Tensor], clients: int = 1, counted: np.ndarray | None = None
    ) -> AbstractContextManager[None]:
        """Run a batch's forward passes within this context without padding, if that pays.

        Args:
            batch: The batch, padded on the right.
            clients: Number of clients whose examples are stacked in the batch, equally many of each.
            counted: (B,), false for filler examples that belong to no client.
        """
        if self._own is None or self._state.why_not is not None:
            return nullcontext()
        layout = layout_of(batch, clients, counted)
        return nullcontext() if layout is None or layout.padding < _WORTH else self._own.within(layout)

    def _verify(self, own: Unpadded, examples: Examples) -> None:
        """Compare predictions with padding and without.

        Raises:
            Padded: If they differ by more than rounding.
        """
        order = np.argsort(examples.lengths, kind="stable")
        if not len(order):
            raise Padded("there are no examples")
        sample = order[np.unique(np.linspace(0, len(order) - 1, _SAMPLE).astype(np.int64))].tolist()
        self.adapted.install({}, {}, frozenset())
        batch = self.task.batch(examples, sample, self.adapted.device)
        layout = layout_of(batch, 1, None)
        if layout is None:
            raise Padded("its batches have no attention mask with padding on the right")
        with evaluating(self.adapted.model):
            wanted = self.task.losses(self.adapted.model, batch, torch.eye(len(sample)).to(self.adapted.device))
            try:
                with own.within(layout):
                    found = self.task.losses(self.adapted.model, batch, torch.eye(len(sample)).to(self.adapted.device))
            except Padded:
                raise
            except Exception as error:  # blocks may fail in any way on tokens in one row
                raise Padded(f"a forward pass without padding failed ({type(error).__name__}: {error})") from error
        apart = float((found - wanted).norm() / wanted.norm())
        if not apart < tolerance(self.adapted.model):
            raise Padded(f"losses differ by {apart:.1e} without padding")


class _State:
    """The state that the replicas share."""

    def __init__(self, why_not: str | None) -> None:
        self.why_not, self.tried, self.lock = why_not, False, Lock()


def layout_of(batch: Mapping[str, Tensor], clients: int, counted: np.ndarray | None) -> TokenLayout | None:
    """Return the layout of a batch that is padded on the right; None for any other batch."""
    mask: Any = batch.get("attention_mask")
    if mask is None or mask.ndim != 2:
        return None
    lengths = mask.sum(1).cpu().numpy()
    ahead = torch.arange(mask.shape[1]) < torch.from_numpy(lengths)[:, None]
    if not bool((mask.bool() == ahead.to(mask.device)).all()):
        return None
    if counted is not None:
        lengths = np.where(counted, lengths, 0)
    return TokenLayout(lengths.astype(np.int64), mask.shape[1], mask.device, clients)
