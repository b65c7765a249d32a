"""Tensors that a method trains, holds and stores for a target layer, counted on tensors that the method creates itself.

Nothing is declared twice: the method's own ``init``, ``sync`` and ``start`` are called. On a layer of a large model,
an SVD would take minutes and gigabytes, so three small layers of the same proportions stand in for it: every count is
a quadratic polynomial in the scale of a layer (factors grow with a side, whole weights with both), which three points
determine. A fourth point detects methods that round (SLoRA's masks); for those, the layer itself is counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from fedspan.config import MethodConfig
from fedspan.core.lowrank import LowRank
from fedspan.core.parametrization import Effective
from fedspan.core.tensors import by_layer, generator
from fedspan.core.values import Client, Job, LayerSpec, Spec

__all__ = ["Computation", "LayerCounts", "StandIn", "count_layer"]


Source = Literal["held", "made"] | None


@dataclass(frozen=True)
class Computation:
    """What a layer computes with, independent of the tensors behind it (``core.parametrization.Effective``).

    Args:
        base: Whether the frozen weight is used.
        weight: Source of a weight in its place: ``held`` on the client, ``made`` in every pass, or None.
        matrix: Source of a matrix added to the weight, likewise.
        rank: Rank of the pair of factors added to the weight; 0: there is none.
        moves: Names of the weight (W), the matrix (D) and the factors (A, B) that have a gradient.
    """

    base: bool = True
    weight: Source = None
    matrix: Source = None
    rank: int = 0
    moves: frozenset[str] = frozenset()


class StandIn:
    """A parametrization that is known only by what its layer computes with."""

    def __init__(self, computation: Computation) -> None:
        self._computation = computation

    def effective(self, slots: Mapping[str, Tensor]) -> Effective:
        wanted = self._computation
        pair: Any = LowRank(slots["B"], slots["A"]) if wanted.rank else slots.get("D")
        weight = slots.get("W")
        if wanted.matrix == "made":
            pair = pair.clone()
        if wanted.weight == "made" and weight is not None:
            weight = weight.clone()
        return Effective(pair, weight, wanted.base)

    def shapes(self, outputs: int, inputs: int) -> dict[str, tuple[int, int]]:
        """Return the shapes of the tensors by slot."""
        wanted, found = self._computation, dict[str, tuple[int, int]]()
        if wanted.rank:
            found |= {"A": (wanted.rank, inputs), "B": (outputs, wanted.rank)}
        if wanted.matrix:
            found["D"] = (outputs, inputs)
        if wanted.weight:
            found["W"] = (outputs, inputs)
        return found


@dataclass(frozen=True)
class LayerCounts:
    """Elements of one target layer, in a client's first job and on the server before the first round.

    Args:
        trained: Elements of every tensor that moves, in order.
        held: Elements of all tensors of the layer on the client, including the trained ones.
        kept: Elements of the server's state.
        computation: Computation of the layer.
    """

    trained: tuple[int, ...]
    held: int
    kept: int
    computation: Computation


class _Noise:
    """Random weights, so that no decomposition is applied to zeros."""

    def __init__(self, layer: LayerSpec) -> None:
        self._layer = layer

    def weight(self, layer: str) -> Tensor:
        return torch.randn(self._layer.shape, generator=generator(0, "plan", layer))

    def extra(self, parameter: str) -> Tensor:
        raise KeyError(parameter)  # no extras are bound here


def count_layer(method: MethodConfig, layer: LayerSpec, rank: int, scaling: float, clients: int) -> LayerCounts:
    """Count the elements of a layer.

    Args:
        method: The method with its options.
        layer: The target layer.
        rank: Rank of the client.
        scaling: The client's factor on B A.
        clients: Clients of the federation.
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

    def measured(scale: int) -> tuple[list[int], Computation]:
        scaled = LayerSpec("layer", sides[0] * scale, sides[1] * scale * taps, kernel)
        return _measure(config, scaled, rank, scaling, clients)

    # Below twice the rank, a pair of factors is larger than the matrix that it represents, and is replaced by it.
    least = math.ceil((2 * rank + 1) / min(sides))
    points, check = (least, least + 1, least + 2), 4 * least
    if check < largest:  # else four small layers cost as much as the layer itself
        found = [measured(at) for at in points]
        rows, (checked, computation) = [counts for counts, _ in found], measured(check)
        if _extrapolated(points, rows, check) == checked:
            return _of(_extrapolated(points, rows, largest), computation)
    return _of(*measured(largest))


def _of(counts: Sequence[int], computation: Computation) -> LayerCounts:
    held, kept, rank, *trained = counts
    return LayerCounts(tuple(trained), held, kept, replace(computation, rank=rank))


def _measure(
    config: MethodConfig, layer: LayerSpec, rank: int, scaling: float, clients: int
) -> tuple[list[int], Computation]:
    method = config.build(Spec((layer,), clients=clients), 0)
    client = Client("client", rank, scaling, 1, 1.0)
    state = method.init(_Noise(layer))
    job = method.start(method.sync(state, client), client, {}, state.round)
    kept = [*state.tensors.values(), *state.memory.values()]
    held = sum(value.numel() for value in job.tensors.values())
    base = sum(delta.numel() for delta in state.base.total.values())
    trained = [job.tensors[name].numel() for name in job.trainable_names]
    computation = _computation(job, layer.name)
    return [held, sum(value.numel() for value in kept) + base, computation.rank, *trained], computation


def _computation(job: Job, layer: str) -> Computation:
    parametrization = job.parametrization.get(layer)
    if parametrization is None:
        return Computation()
    slots = {
        slot: value.detach().requires_grad_(f"{layer}/{slot}" in job.trainable_names)
        for slot, value in by_layer(job.tensors).get(layer, {}).items()
    }
    with torch.enable_grad():
        found = parametrization.effective(slots)
    pair, tensors = found.pair, dict[str, Tensor]()
    if isinstance(pair, LowRank):
        tensors |= {"A": pair.A, "B": pair.B}
    elif pair is not None:
        tensors["D"] = pair
    if found.weight is not None:
        tensors["W"] = found.weight
    return Computation(
        base=found.base,
        weight=_source(found.weight, slots),
        matrix=_source(tensors.get("D"), slots),
        rank=len(pair.A) if isinstance(pair, LowRank) else 0,
        moves=frozenset(name for name, value in tensors.items() if value.requires_grad),
    )


def _source(value: Tensor | None, slots: Mapping[str, Tensor]) -> Source:
    if value is None:
        return None
    return "held" if any(value is one for one in slots.values()) else "made"


def _extrapolated(points: Sequence[int], counts: Sequence[Sequence[int]], at: int) -> list[int]:
    """Evaluate Lagrange's polynomials through three points, in whole numbers."""
    weights = [math.prod(Fraction(at - other, point - other) for other in points if other != point) for point in points]
    values = [
        sum(weight * count for weight, count in zip(weights, row, strict=True)) for row in zip(*counts, strict=True)
    ]
    return [int(value) if Fraction(value).denominator == 1 else -1 for value in values]  # -1: not a count
