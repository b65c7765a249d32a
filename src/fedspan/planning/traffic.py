"""Bytes transmitted in every round of a run, from the methods' declarations (``Method.traffic``) and the cohorts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from fedspan.config import MethodConfig, RunConfig
from fedspan.core.method import Method, RegisteredMethod
from fedspan.core.values import LayerSpec, Spec
from fedspan.federation.federation import cohort_of
from fedspan.models.adapted import AdaptedModel
from fedspan.planning.layer_counts import Computation, LayerCounts, count_layer
from fedspan.runs.setup import client_scaling
from fedspan.wrappers.extras import ExtrasPolicy

__all__ = ["Extras", "RankCounts", "Sent", "Traffic", "extras_of"]


@dataclass(frozen=True)
class Sent:
    """Bytes of tensor data of one round.

    Args:
        clients: Clients of the cohort.
        down: Bytes to all of them.
        up: Bytes from all of them.
    """

    clients: int
    down: int
    up: int


@dataclass(frozen=True)
class Extras:
    """Trained parameters outside the target layers.

    Args:
        policy: Policy that applies to them.
        trained: Elements of the parameters.
        bytes: Bytes of the parameters and their buffers.
        sizes: Elements of every floating-point tensor.
        whole: Bytes of all other tensors, which count batches.
    """

    policy: ExtrasPolicy
    trained: int
    bytes: int
    sizes: tuple[int, ...]
    whole: int


def extras_of(config: RunConfig, adapted: AdaptedModel, method: RegisteredMethod) -> Extras:
    """Return the extras of a run's model under the run's policy, or the method's own."""
    values = adapted.values()
    sizes = tuple(value.numel() for value in values.values() if value.is_floating_point())
    whole = sum(value.numel() * value.element_size() for value in values.values() if not value.is_floating_point())
    trained = sum(value.numel() for value in adapted.extras.values())
    return Extras(config.model.extras or method.claims.extras, trained, 4 * sum(sizes) + whole, sizes, whole)


@dataclass(frozen=True)
class RankCounts:
    """Elements of all target layers, for a client with one rank.

    Args:
        layers: Counts of each kind of layer, with the number of such layers.
        trained: Elements that are trained at a time: in the first job, or in the reply of round 0 or 1 if that is more.
        held: Elements on the client.
        kept: Elements on the server.
    """

    layers: Mapping[LayerSpec, tuple[LayerCounts, int]]
    trained: int
    held: int
    kept: int

    @property
    def computations(self) -> dict[LayerSpec, Computation]:
        """What each kind of layer computes with."""
        return {kind: counts.computation for kind, (counts, _) in self.layers.items()}

    @classmethod
    def of(cls, config: RunConfig, method: RegisteredMethod, rank: int, clients: int) -> Self:
        """Count a method's target layers; layers of one shape are counted once."""
        kinds = Counter(LayerSpec("", *layer.shape, layer.kernel) for layer in method.spec.layers)
        scaling = client_scaling(config, method, rank)
        layers = {kind: (count_layer(config.method, kind, rank, scaling, clients), n) for kind, n in kinds.items()}
        trained = sum(n * sum(counts.trained) for counts, n in layers.values())
        if method.declared().sends == "values":
            # If factors alternate or personal factors train first, the first job is not the largest.
            for round in (0, 1):
                sent = [n * method.traffic(kind, rank, (), round).up for kind, (_, n) in layers.items()]
                trained = max(trained, sum(sent))
        held = max(trained, sum(n * counts.held for counts, n in layers.values()))
        return cls(layers, trained, held, sum(n * counts.kept for counts, n in layers.values()))


class Traffic:
    """Bytes by round.

    Args:
        config: Config of the run.
        adapted: The model, with or without weights.
        method: The run's method, with its extras and wrappers.
        counts: Counts of every rank that a client has.
    """

    def __init__(
        self, config: RunConfig, adapted: AdaptedModel, method: Method, counts: Mapping[int, RankCounts]
    ) -> None:
        self._config, self._method, self._counts = config, method, counts
        self._bare = config.build_method(method.spec)
        self._extras = extras_of(config, adapted, self._bare)
        self._packs = method.upload(1 << 10) != 4 << 10
        self._beside = _beside_extras(config)

    def rounds(self, ranks: Sequence[int]) -> list[Sent]:
        """Compute the bytes of all rounds of the run.

        Args:
            ranks: Ranks of the clients, in the order of their ids.
        """
        federation, sent, held, before = self._config.federation, list[Sent](), set[int](), tuple[int, ...]()
        for number in range(federation.rounds):
            cohort = sorted(cohort_of(self._config.seed, number, len(ranks), federation.clients_per_round))
            down = up = 0
            for rank, count in Counter(ranks[at] for at in cohort).items():
                one = self._layers(rank, before, number)
                down, up = down + count * one[0], up + count * one[1]
            if self._extras.policy == "average":
                beside = self._beside[0] * 4 * sum(self._extras.sizes) if number else 0
                down += len(cohort) * (self._extras.bytes + beside)
                up += len(cohort) * self._extras_up()
            else:
                down += sum(at not in held for at in cohort) * self._extras.bytes
            held.update(cohort)
            before = tuple(ranks[at] for at in cohort)
            sent.append(Sent(len(cohort), down, up))
        return sent

    def _layers(self, rank: int, before: Sequence[int], number: int) -> tuple[int, int]:
        """Return the bytes of all target layers to and from a client of a rank."""
        down = up = 0
        for kind, (counts, n) in self._counts[rank].layers.items():
            traffic = self._method.traffic(kind, rank, before, number)
            down += 4 * n * traffic.down
            up += n * (self._packed(counts, kind, rank, number, traffic.up) if self._packs else 4 * traffic.up)
        return down, up

    def _packed(self, counts: LayerCounts, kind: LayerSpec, rank: int, number: int, elements: int) -> int:
        """Return the bytes of a reply of this many elements, tensor by tensor if its tensors are known."""
        own = self._bare.traffic(kind, rank, (), number).up
        copies = elements // own if own else 0
        sizes = counts.trained if sum(counts.trained) == own else (own,)
        return copies * sum(self._method.upload(size) for size in sizes)

    def _extras_up(self) -> int:
        return self._beside[1] * sum(self._method.upload(size) for size in self._extras.sizes) + self._extras.whole


def _beside_extras(config: RunConfig) -> tuple[int, int]:
    """Count the copies of the extras that wrappers add downstream after the first round, and send upstream in total.

    Extras are transmitted like a layer's whole weight under FedAvg, which supports every wrapper.
    """
    probe = LayerSpec("probe", 8, 8)
    method = MethodConfig(name="fedavg", wrappers=config.method.wrappers)
    bare = method.build(Spec((probe,)), 0)
    training = config.training_settings()
    wrapped = method.wrapped(bare, None, 1.0, training.optimizer, training.max_grad_norm)
    traffic, own = wrapped.traffic(probe, 1, (), 1), math.prod(probe.shape)
    return traffic.down // own - 1, traffic.up // own
