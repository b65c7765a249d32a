"""FedLoRU: FedAvg of LoRA, whose accumulated product moves into the base every tau rounds.

Park and Klabjan, "Communication-Efficient Federated Low-Rank Update Algorithm and its Connection to Implicit
Regularization", arXiv:2409.12371.

    every round:           A <- sum_i p_i A_i,  B <- sum_i p_i B_i        (as FedIT)
    after round t, when (t + 1) mod tau = 0:
                           W <- W + s B A;  A random, B = 0

The rank of the update grows with every accumulation while only factors travel; ``tau`` beyond the run is FedIT.

Deviations: the paper's letters are swapped (its A is our B). Its alpha is our scaling s = lora_alpha / r. The fresh A
is drawn from (seed, number of accumulations), so it does not travel; a client that was absent at an accumulation is
sent the increments that it missed. The published code's ``--accumulate`` merges without re-initialising, which applies
s B A twice; the algorithm of the paper is what stands here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

from torch import Tensor

from fedspan.core.base import Increment
from fedspan.core.factors import a_factors, b_factors, lora_job, reply
from fedspan.core.lowrank import LowRank
from fedspan.core.method import Claims, Memory, RegisteredMethod, Traffic
from fedspan.core.tensors import tensor_name
from fedspan.core.values import (
    Client,
    Contribution,
    Job,
    LayerSpec,
    Message,
    Reduced,
    ServerState,
    Trained,
    Weights,
)

__all__ = ["FedLoRU"]


@final
@dataclass(frozen=True, kw_only=True)
class FedLoRU(RegisteredMethod):
    """Average factors; accumulate them into the base every ``tau`` rounds.

    Args:
        tau: rounds between accumulations (at least 1).
    """

    claims: ClassVar[Claims] = Claims(
        paper="Communication-Efficient Federated Low-Rank Update Algorithm and its Connection to Implicit "
        "Regularization (arXiv:2409.12371)",
        exact=False,
    )

    tau: int = 5

    def declared(self) -> Claims:
        return replace(self.claims, reinitialises=self.tau == 1, moves_base=self.tau == 1)

    def init(self, weights: Weights) -> ServerState:
        return ServerState(tensors=self._fresh(0))

    def _fresh(self, generation: int) -> dict[str, Tensor]:
        key = (generation,) if generation else ()  # generation 0 starts where FedIT does
        return {**a_factors(self, self.r, *key), **b_factors(self.spec, self.r)}

    def sync(self, state: ServerState, client: Client | None) -> Message:
        held = None if client is None else client.held
        scalars = {"generation": state.generation}
        if state.round == max(0, state.base.round):  # just re-initialised (or never trained): the seed says it all
            return Message(scalars=scalars, base=state.base.since(held))
        return Message(state.tensors, scalars, state.base.since(held))

    def start(self, message: Message, client: Client | None, memory: Memory) -> Job:
        generation = int(message.scalars["generation"])
        tensors = message.tensors or self._fresh(generation)
        return lora_job(self, tensors, client, train=("A", "B"), generation=generation)

    def finish(self, job: Job, trained: Trained, client: Client, memory: Memory) -> tuple[Message, Memory]:
        return reply(job, trained), memory

    def contribute(self, message: Message, client: Client) -> Contribution:
        return Contribution(sum=message.tensors)

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        if (state.round + 1) % self.tau:
            return state.next(tensors=reduced.mean)
        deltas = {
            layer.name: LowRank(
                reduced.mean[tensor_name(layer.name, "B")],
                reduced.mean[tensor_name(layer.name, "A")],
                self.scaling(None),
            )
            for layer in self.spec.layers
        }
        generation = state.generation + 1
        return state.next(
            tensors=self._fresh(generation),
            base=state.base.add(Increment(state.round + 1, deltas)),
            generation=generation,
        )

    def traffic(self, layer: LayerSpec, rank: int, cohort: Sequence[int], round: int) -> Traffic:
        both = rank * (layer.out_features + layer.in_features)
        return Traffic(down=both if round else 0, up=both)
