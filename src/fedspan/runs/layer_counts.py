"""How many numbers a method trains, holds and keeps for a target layer, counted on tensors that it makes itself.

Nothing is declared twice: the method's own ``init``, ``sync`` and ``start`` are called. On a layer of a large model
that would take an SVD of minutes and gigabytes, so three small layers of the same proportions stand in for it: every
count is a polynomial of second degree in the scale of a layer (factors grow with a side, whole weights with both),
which three points determine. A fourth tells where a method rounds (SLoRA's masks); there the layer itself is counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor

from fedspan.config import MethodConfig
from fedspan.core.tensors import generator
from fedspan.core.values import Client, LayerSpec, Spec

__all__ = ["LayerCounts", "count_layer"]


@dataclass(frozen=True)
class LayerCounts:
    """Elements of one target layer, in a client's first job and on the server before the first round.

    Args:
        trained: of every tensor that moves, in order.
        held: of all tensors of the layer on the client, those included.
        kept: of the server's state.
    """

    trained: tuple[int, ...]
    held: int
    kept: int


class _Noise:
    """Random weights, so that no decomposition meets zeros."""

    def __init__(self, layer: LayerSpec) -> None:
        self._layer = layer

    def weight(self, layer: str) -> Tensor:
        return torch.randn(self._layer.shape, generator=generator(0, "plan", layer))

    def extra(self, parameter: str) -> Tensor:
        raise KeyError(parameter)  # no extras are bound here


def count_layer(method: MethodConfig, layer: LayerSpec, rank: int, scaling: float, clients: int) -> LayerCounts:
    """The counts of a layer.

    Args:
        method: with its options.
        layer: the target layer.
        rank: the client's.
        scaling: the client's factor on B A.
        clients: of the federation.
    """
    return _count(method.model_dump_json(), layer.shape, layer.kernel, rank, scaling, clients)


@lru_cache(maxsize=4096)
def _count(
    method: str, shape: tuple[int, int], kernel: tuple[int, int], rank: int, scaling: float, clients: int
) -> LayerCounts:
    config, taps = MethodConfig.model_validate_json(method), math.prod(kernel)
    outputs, channels = shape[0], shape[1] // taps
    largest = math.gcd(outputs, channels)
    sides = outputs // largest, channels // largest

    def counted(scale: int) -> list[int]:
        scaled = LayerSpec("layer", sides[0] * scale, sides[1] * scale * taps, kernel)
        return _measure(config, scaled, rank, scaling, clients)

    # Below twice the rank, pairs of factors outgrow the matrix that they stand for, and turn into it.
    least = math.ceil((2 * rank + 1) / min(sides))
    points, check = (least, least + 1, least + 2), 4 * least
    counts = None
    if check < largest:  # else four small layers are no less work than the layer itself
        found = [counted(at) for at in points]
        if _extrapolated(points, found, check) == counted(check):
            counts = _extrapolated(points, found, largest)
    counts = counts or counted(largest)
    return LayerCounts(tuple(counts[2:]), counts[0], counts[1])


def _measure(config: MethodConfig, layer: LayerSpec, rank: int, scaling: float, clients: int) -> list[int]:
    method = config.build(Spec((layer,), clients=clients), 0)
    client = Client("client", rank, scaling, 1, 1.0)
    state = method.init(_Noise(layer))
    job = method.start(method.sync(state, client), client, {})
    kept = [*state.tensors.values(), *state.memory.values()]
    held = sum(value.numel() for value in job.tensors.values())
    base = sum(delta.numel() for delta in state.base.total.values())
    trained = [job.tensors[name].numel() for name in job.trainable_names]
    return [held, sum(value.numel() for value in kept) + base, *trained]


def _extrapolated(points: Sequence[int], counts: Sequence[Sequence[int]], at: int) -> list[int]:
    """Lagrange's polynomials through three points, in whole numbers."""
    weights = [math.prod(Fraction(at - other, point - other) for other in points if other != point) for point in points]
    values = [
        sum(weight * count for weight, count in zip(weights, row, strict=True)) for row in zip(*counts, strict=True)
    ]
    return [int(value) if Fraction(value).denominator == 1 else -1 for value in values]  # -1: no count
