"""FedGaLore: GaLore-AdamW on the clients, their projected second moments synchronised by AJIVE on the server.

"FedGaLore", algorithm 1 and appendices A.1, E; GaLore is arXiv:2403.03507.

    client i:  g~ = g P^T (or P^T g);  m~, v~ by Adam from m~ = 0, v~ = vbar;  W <- W - lr u~ P
               P renewed every ``period`` steps (``svd`` of the gradient, or ``random`` from a seed that advances),
               m~ and v~ carried over
    server:    theta <- theta + sum_i p_i (theta_i - theta);  vbar <- AJIVE({v~_i R^T})

Decided here, since the paper does not: vbar is the weighted mean of ``J_i + column means``, clamped at 0, in the
coordinates of the seeded projector that precedes the next round's first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from fedspan.core.alignment import ajive_joint_basis
from fedspan.core.base import Increment
from fedspan.core.factors import names
from fedspan.core.lowrank import LowRank, concatenate
from fedspan.core.method import Claims, Memory, RegisteredMethod, Traffic
from fedspan.core.parametrization import Projected
from fedspan.core.projectors import random_projector, side_of
from fedspan.core.tensors import generator, tensor_name
from fedspan.core.values import (
    Client,
    Contribution,
    Group,
    Job,
    LayerSpec,
    Message,
    OptimizerState,
    Reduced,
    Refresh,
    ServerState,
    StackItem,
    Trained,
    Weights,
)


def seeded_projector(layer: LayerSpec, rank: int, seed: int) -> Tensor:
    """The projector that ``engines.refresh`` draws for a seed (which a method cannot import: the key stands twice)."""
    return random_projector(layer.shape, rank, side_of(layer.shape), generator(seed, "projector", layer.name))


@final
@dataclass(frozen=True, kw_only=True)
class FedGaLore(RegisteredMethod):
    """GaLore clients, summed updates, synchronised second moments.

    Args:
        rule: of the projectors. ``random``: accumulators sum; ``svd``: projectors differ, so segments stack.
        steps: local steps T, the same for every client.
        period: steps between projectors (tau).
        moments: how moments follow a new projector.
    """

    claims: ClassVar[Claims] = Claims(paper="FedGaLore", exact=True, reduction="stack", reinitialises=True)

    rule: Literal["random", "svd"] = "random"
    steps: int = 4
    period: int = 2
    moments: str = "linear"

    @property
    def segments(self) -> int:
        """Projectors of one round."""
        return -(-self.steps // self.period)

    def init(self, weights: Weights) -> ServerState:
        return ServerState(memory={tensor_name(one.name, "v"): self._zeros(one) for one in self.spec.layers})

    def _zeros(self, layer: LayerSpec) -> Tensor:
        right = side_of(layer.shape) == "right"
        return torch.zeros((layer.out_features, self.r) if right else (self.r, layer.in_features))

    def sync(self, state: ServerState, client: Client | None) -> Message:
        held = None if client is None else client.held
        return Message(state.memory, {"seed": self.segments * state.round}, state.base.since(held))

    def start(self, message: Message, client: Client | None, memory: Memory) -> Job:
        seed = int(message.scalars["seed"])
        tensors: dict[str, Tensor] = {}
        second: dict[str, Tensor] = {}
        for layer in self.spec.layers:
            tensors[tensor_name(layer.name, "acc")] = self._zeros(layer)
            tensors[tensor_name(layer.name, "P")] = seeded_projector(layer, self.r, seed - 1)
            second[tensor_name(layer.name, "acc")] = message.tensors[tensor_name(layer.name, "v")]
        return Job(
            parametrization={layer.name: Projected(side_of(layer.shape)) for layer in self.spec.layers},
            tensors=tensors,
            trainable=(Group(names(self.spec, "acc")),),
            steps=self.steps,
            optimizer={"name": "adamw", "bias_correction": (False, False)},
            optimizer_state=OptimizerState({"exp_avg_sq": second}),
            refresh=Refresh(self.period, rule=self.rule, seed=seed, moments=self.moments),
            generation=seed,
            decay_base=True,
        )

    def finish(self, job: Job, trained: Trained, client: Client, memory: Memory) -> tuple[Message, Memory]:
        reply: dict[str, Tensor] = {}
        for layer in self.spec.layers:
            acc = tensor_name(layer.name, "acc")
            effective = job.parametrization[layer.name].effective(_slots(trained.tensors, layer.name))
            assert effective.pair is not None
            B, A = effective.pair.B, effective.pair.A
            right = side_of(layer.shape) == "right"
            if self.rule == "svd":
                reply[tensor_name(layer.name, "B")], reply[tensor_name(layer.name, "A")] = B, A
                reply[tensor_name(layer.name, "P")] = trained.tensors[tensor_name(layer.name, "P")]
            else:  # the projectors follow from the seed
                reply[tensor_name(layer.name, "accs")] = B if right else A
            reply[tensor_name(layer.name, "v")] = trained.optimizer_state.moments["exp_avg_sq"][acc]
        return Message(reply), memory

    def contribute(self, message: Message, client: Client) -> Contribution:
        if self.rule == "svd":
            return Contribution(stack=message.tensors)
        sums = {name: value for name, value in message.tensors.items() if name.endswith("/accs")}
        return Contribution(sum=sums, stack={n: v for n, v in message.tensors.items() if n not in sums})

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        seed = self.segments * state.round
        deltas = {layer.name: self._delta(layer, reduced, seed) for layer in self.spec.layers}
        moments = {tensor_name(one.name, "v"): self._moment(one, reduced, seed) for one in self.spec.layers}
        base = state.base.add(Increment(state.round + 1, deltas))
        return state.next(memory=moments, base=base, generation=state.generation + 1)

    def _delta(self, layer: LayerSpec, reduced: Reduced, seed: int) -> LowRank:
        if self.rule == "svd":
            b, a = tensor_name(layer.name, "B"), tensor_name(layer.name, "A")
            return concatenate([LowRank(one.tensors[b], one.tensors[a], one.weight) for one in reduced.stack])
        accs = reduced.mean[tensor_name(layer.name, "accs")]
        Ps = [seeded_projector(layer, self.r, seed + number).to(accs) for number in range(self.segments)]
        if side_of(layer.shape) == "right":
            return LowRank(accs, torch.cat(Ps, 0))
        return LowRank(torch.cat(Ps, 1), accs)

    def _moment(self, layer: LayerSpec, reduced: Reduced, seed: int) -> Tensor:
        right = side_of(layer.shape) == "right"
        name = tensor_name(layer.name, "v")
        views = [(one.tensors[name] if right else one.tensors[name].T).double() for one in reduced.stack]
        U = ajive_joint_basis(views, self.r, view_rank=self.r)
        next_P = seeded_projector(layer, self.r, seed + self.segments - 1).double()
        total = torch.zeros_like(views[0])
        for item, view in zip(reduced.stack, views, strict=True):
            mean = view.mean(0, keepdim=True)
            joint = U @ (U.T @ (view - mean)) + mean
            total += item.weight * joint @ self._change_of_basis(layer, item, next_P)
        total = (total if right else total.T).clamp_min(0.0)
        return total.to(reduced.stack[0].tensors[name].dtype)

    def _change_of_basis(self, layer: LayerSpec, item: StackItem, next_P: Tensor) -> Tensor:
        if self.rule == "random":
            return torch.eye(self.r, dtype=torch.float64)  # everybody's last projector is the seed's
        P = item.tensors[tensor_name(layer.name, "P")].double()
        return P @ next_P.T if side_of(layer.shape) == "right" else P.T @ next_P

    def traffic(self, layer: LayerSpec, rank: int, cohort: Sequence[int], round: int) -> Traffic:
        right = side_of(layer.shape) == "right"
        moment = rank * (layer.out_features if right else layer.in_features)
        whole = layer.out_features * layer.in_features
        segments = self.segments * rank * (layer.out_features + layer.in_features)
        base = min(segments * (len(cohort) if self.rule == "svd" else 1), whole) if round else 0
        if self.rule == "svd":
            return Traffic(down=moment + base, up=moment + segments + rank * (sum(layer.shape)) - moment)
        return Traffic(down=moment + base, up=moment * (1 + self.segments))


def _slots(tensors: dict[str, Tensor], layer: str) -> dict[str, Tensor]:
    prefix = layer + "/"
    return {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}
