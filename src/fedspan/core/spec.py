"""What every party knows of the model before anything is trained; ``core.values`` has these names too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

__all__ = ["LayerSpec", "Spec", "Weights"]


@dataclass(frozen=True)
class LayerSpec:
    """A target layer: its module path and its weight's shape as (O, I), whatever way round the module stores it."""

    name: str
    out_features: int
    in_features: int

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)."""
        return self.out_features, self.in_features


@dataclass(frozen=True)
class Spec:
    """What every party knows of the model: target layers, and the extras' shapes by parameter path."""

    layers: tuple[LayerSpec, ...]
    extras: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


class Weights(Protocol):
    """Read access to the pretrained model, for a server's ``init``."""

    def weight(self, layer: str) -> Tensor:
        """W0 of a target layer, (O, I), float32; a copy."""
        ...

    def extra(self, parameter: str) -> Tensor:
        """The initial value of one of the extras; a copy."""
        ...
