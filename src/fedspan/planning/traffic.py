"""Bytes transmitted in every round of a run, from the method's own functions and the cohorts.

What a method trains, holds and stores for a target layer is counted on tensors that it creates itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, Self

import torch
from torch import Tensor

from fedspan.config import RunConfig
from fedspan.core.lowrank import LowRank
from fedspan.core.method import RegisteredMethod
from fedspan.core.parametrization import Effective
from fedspan.core.tensors import Tensors, count, group_by_layer
from fedspan.core.values import Job, LayerSpec, Message, Spec
from fedspan.federation.federation import draw_cohort
from fedspan.federation.serialization import compute_payload_size
from fedspan.methods.fedavg import FedAvg
from fedspan.models.adapted import AdaptedModel
from fedspan.models.head import find_output_layer
from fedspan.planning.shape_inference import ShapeInference, count_traffic, rewrap_method
from fedspan.wrappers.extras import ExtrasPolicy

WeightSource = Literal["held", "made"] | None


@dataclass(frozen=True)
class Computation:
    """What a layer computes with, independent of the tensors behind it (``core.parametrization.Effective``)."""

    base: bool = True
    weight: WeightSource = None
    """Source of a weight in its place: ``held`` on the client, ``made`` in every pass, or None."""
    matrix: WeightSource = None
    """Source of a matrix added to the weight, likewise."""
    rank: int = 0
    """Rank of the pair of factors added to the weight; 0: there is none."""
    moves: frozenset[str] = frozenset()
    """Names of the weight (W), the matrix (D) and the factors (A, B) that have a gradient."""


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
    """Elements of one target layer."""

    trained: tuple[int, ...]
    """Elements that move in each job of a client's first two rounds, in order."""
    held: int
    """Elements of all tensors of the layer on the client in its first job, including the trained ones."""
    stored: int
    """Elements of the server's state before the first round."""
    computation: Computation
    """Computation of the layer in the client's first job."""


def count_layer(method: RegisteredMethod, layer: LayerSpec, rank: int) -> LayerCounts:
    """Count the elements of a layer.

    Args:
        method: The method, without wrappers; of its spec, only the number of clients matters.
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


@dataclass(frozen=True)
class RoundTraffic:
    """Bytes of tensor data of one round."""

    clients: int
    down: int
    up: int


@dataclass(frozen=True)
class Extras:
    """Trained parameters outside the target layers."""

    policy: ExtrasPolicy
    trained: int
    values: Tensors
    """The parameters and their buffers by path, as they are transmitted, on the meta device."""

    @property
    def bytes(self) -> int:
        """Bytes of the parameters and their buffers."""
        return compute_payload_size(Message(self.values))


def list_extras(config: RunConfig, adapted: AdaptedModel, method: RegisteredMethod) -> Extras:
    """Return the extras of a run's model under the run's policy, or the method's own."""
    values = {
        path: value.float() if value.is_floating_point() else value for path, value in adapted.get_values().items()
    }
    return Extras(config.model.extras or method.claims.extras, count(adapted.extras), values)


@dataclass(frozen=True)
class RankCounts:
    """Elements of all target layers, for a client with one rank."""

    computations: Mapping[LayerSpec, Computation]
    trained: int
    """Elements that are trained at a time: in the largest job of the first two rounds."""
    held: int
    stored: int

    @classmethod
    def count(cls, method: RegisteredMethod, rank: int) -> Self:
        """Count a method's target layers; layers of one shape are counted once."""
        counts = [
            (kind, count_layer(method, kind, rank), number) for kind, number in count_layer_shapes(method.spec).items()
        ]

        def sum_layers(elements: Sequence[int]) -> int:
            return sum(number * element for (_, _, number), element in zip(counts, elements, strict=True))

        trained = max(map(sum_layers, zip(*(layer.trained for _, layer, _ in counts), strict=True)))
        held_elements = max(trained, sum_layers([layer.held for _, layer, _ in counts]))
        stored = sum_layers([layer.stored for _, layer, _ in counts])
        return cls({kind: layer.computation for kind, layer, _ in counts}, trained, held_elements, stored)


def count_layer_shapes(spec: Spec) -> Counter[LayerSpec]:
    """Count the target layers of each shape."""
    return Counter(LayerSpec("", *layer.shape, layer.kernel) for layer in spec.layers)


def plan_traffic(
    config: RunConfig, adapted: AdaptedModel, method: RegisteredMethod, ranks: Sequence[int]
) -> list[RoundTraffic]:
    """Compute the bytes of all rounds of a run.

    Rounds that train the head alone are planned for a method that starts from the pretrained model.
    """
    federation, wrapped, extras = config.federation, config.wrap_method(method), list_extras(config, adapted, method)
    cohorts = [
        sorted(draw_cohort(config.seed, number, len(ranks), federation.clients_per_round))
        for number in range(federation.most_rounds)
    ]
    head_rounds = count_head_rounds(config, extras)
    by_rank = [[ranks[client] for client in cohort] for cohort in cohorts[head_rounds:]]

    def count_bytes(bare: RegisteredMethod, values: Tensors = MappingProxyType({})) -> list[tuple[int, int]]:
        """Count the bytes to and from all clients of each round; ``values`` are those of the extras of the spec."""
        rows = count_traffic(rewrap_method(wrapped, bare), ranks, by_rank, values)
        return [
            (sum(row[rank].down for rank in cohort), sum(row[rank].up for rank in cohort))
            for row, cohort in zip(rows, by_rank, strict=True)
        ]

    layers = [
        (number, count_bytes(replace(method, spec=Spec((kind,), clients=len(ranks)))))
        for kind, number in count_layer_shapes(method.spec).items()
    ]
    # Extras are transmitted alike around every method; FedAvg supports every wrapper.
    beside = count_bytes(FedAvg(spec=replace(method.spec, layers=())), extras.values)
    path = f"{find_output_layer(adapted).path}." if head_rounds else ""
    trained = {name: value for name, value in extras.values.items() if name.startswith(path)}
    head = compute_payload_size(Message(trained)) if head_rounds else 0
    rounds, informed = list[RoundTraffic](), set[int]()
    for cohort in cohorts[:head_rounds]:
        rounds.append(RoundTraffic(len(cohort), len(cohort) * extras.bytes, len(cohort) * head))
    for number, cohort in enumerate(cohorts[head_rounds:]):
        down = sum(times * rows[number][0] for times, rows in layers)
        up = sum(times * rows[number][1] for times, rows in layers)
        if extras.policy == "average":
            down, up = down + beside[number][0], up + beside[number][1]
        else:
            down += sum(client not in informed for client in cohort) * extras.bytes
        informed.update(cohort)
        rounds.append(RoundTraffic(len(cohort), down, up))
    return rounds


def count_head_rounds(config: RunConfig, extras: Extras) -> int:
    """Count the rounds that train the head alone, which is taken to be new."""
    is_random = config.head_kind[0] is None and extras.policy == "average"
    return config.head_rounds if is_random else 0
