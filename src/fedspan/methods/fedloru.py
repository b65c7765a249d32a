"""FedLoRU: FedAvg of LoRA, whose accumulated product moves into the base every tau rounds.

Park and Klabjan, "Communication-Efficient Federated Low-Rank Update Algorithm and its Connection to Implicit
Regularization", arXiv:2409.12371, algorithm 1.

    every round:           A <- sum_i p_i A_i,  B <- sum_i p_i B_i        (as FedIT)
    after round t, when (t + 1) mod tau = 0:
                           W <- W + s B A;  A random, B = 0

The rank of the update grows with every accumulation, while only factors are transmitted; with ``tau`` larger than the
number of rounds it is FedIT.
``from_scratch`` is the pre-training of the published code: the target layers' weights count as zero (a base update with
rho = 0; they are not overwritten), and A and B both start at random.

Deviations: the paper's letters are swapped (its A is our B). Its alpha is our scaling s = lora_alpha / r, of which the
paper gives no value (the published code: lora_alpha = 64 at any rank). The paper's two forms, merging into the weight
and (appendix C.1) keeping the list of pairs beside it, are one here: an accumulation is an increment of the base
update, which holds the pairs one after another and leaves W0 as it is; only when the list has outgrown the weight does
it become a matrix beside W0. The new A is drawn from (seed, number of accumulations), so it is not transmitted; a
client that was absent at an accumulation is sent the increments that it missed. The published code's ``--accumulate``
merges without re-initializing, which applies s B A twice; the paper's algorithm stands here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from fedspan.core.aggregation import choose_smaller_form
from fedspan.core.base import BaseUpdate, Increment
from fedspan.core.factors import create_b_factors, create_lora_job, draw_a_factors, draw_kaiming
from fedspan.core.lowrank import LowRank
from fedspan.core.method import Claims, Memory, RegisteredMethod
from fedspan.core.tensors import create_generator, join_tensor_name
from fedspan.core.values import Client, Job, Message, Reduced, ServerState, Weights


@dataclass(frozen=True, kw_only=True)
class FedLoRU(RegisteredMethod):
    """Average factors; accumulate them into the base every ``tau`` rounds.

    Args:
        tau: Number of rounds between accumulations (at least 1).
        from_scratch: Whether to start from zero target layers, with A and B both random, not the pretrained weights.
    """

    claims: ClassVar[Claims] = Claims(
        paper="Communication-Efficient Federated Low-Rank Update Algorithm and its Connection to Implicit "
        "Regularization (arXiv:2409.12371)",
        exact=False,
        sends_base=True,
    )

    tau: int = 5
    from_scratch: bool = False

    def declare_claims(self) -> Claims:
        return replace(self.claims, reinitializes=self.tau == 1, moves_base=self.tau == 1)

    def init(self, weights: Weights) -> ServerState:
        base = BaseUpdate().add(Increment(0, {}, decay=0.0)) if self.from_scratch else BaseUpdate()
        return ServerState(tensors=self.create_factors(0), base=base)

    def create_factors(self, generation: int) -> dict[str, Tensor]:
        """Create A and B after ``generation`` accumulations."""
        key = (generation,) if generation else ()  # generation 0 starts where FedIT does
        if generation or not self.from_scratch:
            return {**draw_a_factors(self, self.r, *key), **create_b_factors(self.spec, self.r)}
        random_B = {
            join_tensor_name(layer.name, "B"): draw_kaiming(
                layer.out_features, self.r, create_generator(self.seed, "B", layer.name)
            )
            for layer in self.spec.layers
        }
        return {**draw_a_factors(self, self.r), **random_B}

    def sync(self, state: ServerState, client: Client | None) -> Message:
        known_round = None if client is None else client.last_round
        scalars = {"generation": state.generation}
        if state.round == max(0, state.base.round):  # just re-initialized (or never trained): the seed suffices
            return Message(scalars=scalars, base=state.base.build_patch(known_round))
        return Message(state.tensors, scalars, state.base.build_patch(known_round))

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        generation = int(message.scalars["generation"])
        tensors = message.tensors or self.create_factors(generation)
        return create_lora_job(self, tensors, client, train=("A", "B"), generation=generation)

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        if (state.round + 1) % self.tau:
            return state.advance_round(tensors=reduced.mean)
        deltas = {
            layer.name: choose_smaller_form(
                LowRank(
                    reduced.mean[join_tensor_name(layer.name, "B")],
                    reduced.mean[join_tensor_name(layer.name, "A")],
                    self.get_scaling(None),
                )
            )
            for layer in self.spec.layers
        }
        generation = state.generation + 1
        return state.advance_round(
            tensors=self.create_factors(generation),
            base=state.base.add(Increment(state.round + 1, deltas)),
            generation=generation,
        )
