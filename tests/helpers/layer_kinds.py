"""Layers of every kind that can have an adapter, each in a model of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


def images(*shape: int) -> Callable[[], Tensor]:
    """What draws inputs of this shape."""
    return lambda: torch.randn(*shape, dtype=torch.float64)


def words(*shape: int) -> Callable[[], Tensor]:
    """What draws ids of words, in a tensor of this shape."""
    return lambda: torch.randint(0, 7, shape)


MODULES: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(5, 3), images(2, 4, 5)),
    "linear without bias": (lambda: nn.Linear(3, 6, bias=False), images(4, 3)),
    "conv1d": (lambda: Conv1D(6, 4), images(2, 3, 4)),
    "conv": (lambda: nn.Conv2d(3, 5, 3, padding=1), images(2, 3, 6, 4)),
    "conv 1x1": (lambda: nn.Conv2d(4, 3, 1, bias=False), images(2, 4, 3, 5)),
    "conv strided": (lambda: nn.Conv2d(2, 5, (3, 2), stride=(2, 1), padding=(1, 0)), images(3, 2, 7, 5)),
    "conv dilated": (lambda: nn.Conv2d(3, 4, (2, 3), dilation=(2, 1), bias=False), images(2, 3, 6, 7)),
    "conv same": (lambda: nn.Conv2d(3, 4, (2, 5), padding="same"), images(2, 3, 6, 9)),
    "conv same dilated": (lambda: nn.Conv2d(3, 4, (3, 4), padding="same", dilation=(2, 1)), images(2, 3, 6, 9)),
    "conv valid": (lambda: nn.Conv2d(3, 4, (1, 3), padding="valid", bias=False), images(2, 3, 4, 5)),
    "embedding": (lambda: nn.Embedding(7, 4), words(3, 5)),
    "embedding padded": (lambda: nn.Embedding(7, 4, padding_idx=2), lambda: torch.tensor([[2, 2, 0], [6, 2, 6]])),
}
"""By kind: what makes a layer, and what draws an input for it."""
of_each_fit = pytest.mark.parametrize("kind", [kind for kind in MODULES if "dilated" not in kind])


class Whole(nn.Module):
    """A model of one layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)
