"""The model as every party knows it before training; ``core.values`` re-exports these names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class LayerSpec:
    """A target layer: its module path and its weight's shape as (O, I), in whichever orientation the module stores it.

    A convolution is its unfolded matrix, as in PEFT's LoRA: I = channels * k1 * k2, in the order of its weight
    (O, channels, k1, k2). An embedding is (dimension, vocabulary), the matrix that a one-hot input meets.

    Args:
        kernel: Kernel size (k1, k2) of a convolution.
    """

    name: str
    out_features: int
    in_features: int
    kernel: tuple[int, int] = (1, 1)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (O, I) of the weight."""
        return self.out_features, self.in_features

    @property
    def rectangle(self) -> tuple[int, int]:
        """Shape (O k1, channels * k2) of the more nearly square matrix of the same numbers; (O, I) without a kernel."""
        return self.out_features * self.kernel[0], self.in_features // self.kernel[0]


@dataclass(frozen=True)
class Spec:
    """The model and the federation, as every party knows them.

    Args:
        extras: Shapes of the parameters that train beside them, and of their buffers, by path.
        buffers: Extras that are buffers: the forward pass updates them, no optimizer does.
        variances: Buffers that hold variances, which are never negative.
        clients: Number of clients in the federation, selected or not; 0 if unknown.
    """

    layers: tuple[LayerSpec, ...]
    extras: Mapping[str, tuple[int, ...]] = field(default_factory=dict, hash=False)  # equal specs hash alike without it
    buffers: frozenset[str] = frozenset()
    variances: frozenset[str] = frozenset()
    clients: int = 0


class Weights(Protocol):
    """Read access to the pretrained model, for a server's ``init``."""

    def get_weight(self, layer: str) -> Tensor:
        """Return W0 of a target layer, (O, I), float32; a copy."""
        ...

    def get_extra(self, parameter: str) -> Tensor:
        """Return the initial value of one of the extras; a copy."""
        ...
