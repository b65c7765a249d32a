"""What every party knows of the model before anything is trained; ``core.values`` has these names too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

__all__ = ["LayerSpec", "Spec", "Weights"]


@dataclass(frozen=True)
class LayerSpec:
    """A target layer: its module path and its weight's shape as (O, I), whatever way round the module stores it.

    A convolution is its unfolded matrix, as in PEFT's LoRA: I = channels * k1 * k2, in the order of its weight
    (O, channels, k1, k2). An embedding is (dimension, vocabulary), the matrix that a one-hot input meets.

    Args:
        name: module path.
        out_features: O.
        in_features: I.
        kernel: (k1, k2) of a convolution.
    """

    name: str
    out_features: int
    in_features: int
    kernel: tuple[int, int] = (1, 1)

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)."""
        return self.out_features, self.in_features

    @property
    def rectangle(self) -> tuple[int, int]:
        """(O k1, channels * k2): the matrix of the same numbers that is nearer to a square; (O, I) without a kernel."""
        return self.out_features * self.kernel[0], self.in_features // self.kernel[0]


@dataclass(frozen=True)
class Spec:
    """What every party knows of the model and the federation.

    Args:
        layers: target layers.
        extras: shapes of what trains beside them, by parameter path; their buffers too.
        buffers: which of the extras are buffers: the forward pass moves them, no optimizer does.
        clients: how many the federation has, asked or not; 0 where nobody said.
    """

    layers: tuple[LayerSpec, ...]
    extras: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()
    clients: int = 0


class Weights(Protocol):
    """Read access to the pretrained model, for a server's ``init``."""

    def weight(self, layer: str) -> Tensor:
        """W0 of a target layer, (O, I), float32; a copy."""
        ...

    def extra(self, parameter: str) -> Tensor:
        """The initial value of one of the extras; a copy."""
        ...
