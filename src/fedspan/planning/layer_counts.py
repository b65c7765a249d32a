"""Tensors that a method trains, holds and stores for a target layer, counted on tensors that it creates itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedspan.core.lowrank import LowRank
from fedspan.core.method import RegisteredMethod
from fedspan.core.parametrization import Effective
from fedspan.core.tensors import count, group_by_layer
from fedspan.core.values import Job, LayerSpec, Spec
from fedspan.planning.shape_inference import ShapeInference

WeightSource = Literal["held", "made"] | None


@dataclass(frozen=True)
class Computation:
    """What a layer computes with, independent of the tensors behind it (``core.parametrization.Effective``).

    Args:
        weight: Source of a weight in its place: ``held`` on the client, ``made`` in every pass, or None.
        matrix: Source of a matrix added to the weight, likewise.
        rank: Rank of the pair of factors added to the weight; 0: there is none.
        moves: Names of the weight (W), the matrix (D) and the factors (A, B) that have a gradient.
    """

    base: bool = True
    weight: WeightSource = None
    matrix: WeightSource = None
    rank: int = 0
    moves: frozenset[str] = frozenset()


class StandIn:
    """A parametrization that is known only by what its layer computes with."""

    def __init__(self, computation: Computation) -> None:
        self._computation = computation

    def compute_effective(self, slots: Mapping[str, Tensor]) -> Effective:
        computation = self._computation
        pair: Any = LowRank(slots["B"], slots["A"]) if computation.rank else slots.get("D")
        weight = slots.get("W")
        if computation.matrix == "made":
            pair = pair.clone()
        if computation.weight == "made" and weight is not None:
            weight = weight.clone()
        return Effective(pair, weight, computation.base)

    def shapes(self, outputs: int, inputs: int) -> dict[str, tuple[int, int]]:
        """Return the shapes of the tensors by slot."""
        computation, shapes = self._computation, dict[str, tuple[int, int]]()
        if computation.rank:
            shapes |= {"A": (computation.rank, inputs), "B": (outputs, computation.rank)}
        if computation.matrix:
            shapes["D"] = (outputs, inputs)
        if computation.weight:
            shapes["W"] = (outputs, inputs)
        return shapes


@dataclass(frozen=True)
class LayerCounts:
    """Elements of one target layer.

    Args:
        trained: Elements that move in each job of a client's first two rounds, in order.
        held: Elements of all tensors of the layer on the client in its first job, including the trained ones.
        stored: Elements of the server's state before the first round.
        computation: Computation of the layer in the client's first job.
    """

    trained: tuple[int, ...]
    held: int
    stored: int
    computation: Computation


def count_layer(method: RegisteredMethod, layer: LayerSpec, rank: int) -> LayerCounts:
    """Count the elements of a layer.

    Args:
        method: The method, without wrappers; of its spec, only the number of clients matters.
        layer: The target layer.
        rank: Rank of the client.
    """
    run = ShapeInference(replace(method, spec=Spec((layer,), clients=method.spec.clients)), [rank])
    state = run.state
    base = sum(delta.numel() for delta in state.base.total.values())
    if method.estimate_messages(layer, rank, 0) is None:
        jobs = [job for _ in range(2) for job in run.run_round([rank])[rank].jobs]
    else:
        jobs = [run.start(rank)[1]]
    return LayerCounts(
        trained=tuple(sum(job.tensors[name].numel() for name in job.trainable_names) for job in jobs),
        held=count(jobs[0].tensors),
        stored=count(state.tensors) + count(state.memory) + base,
        computation=_build_computation(jobs[0], layer.name),
    )


def _build_computation(job: Job, layer: str) -> Computation:
    parametrization = job.parametrization.get(layer)
    if parametrization is None:
        return Computation()
    slots = {
        slot: value.detach().requires_grad_(f"{layer}/{slot}" in job.trainable_names)
        for slot, value in group_by_layer(job.tensors).get(layer, {}).items()
    }
    with torch.enable_grad():
        effective = parametrization.compute_effective(slots)
    pair, tensors = effective.pair, dict[str, Tensor]()
    if isinstance(pair, LowRank):
        tensors |= {"A": pair.A, "B": pair.B}
    elif pair is not None:
        tensors["D"] = pair
    if effective.weight is not None:
        tensors["W"] = effective.weight
    return Computation(
        base=effective.base,
        weight=_classify_source(effective.weight, slots),
        matrix=_classify_source(tensors.get("D"), slots),
        rank=len(pair.A) if isinstance(pair, LowRank) else 0,
        moves=frozenset(name for name, value in tensors.items() if value.requires_grad),
    )


def _classify_source(value: Tensor | None, slots: Mapping[str, Tensor]) -> WeightSource:
    if value is None:
        return None
    return "held" if any(value is slot for slot in slots.values()) else "made"
