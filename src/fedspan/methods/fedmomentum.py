"""FedMomentum: keep the strongest directions of the exact average as the new factors, put the rest into the base.

Yan et al., "FedMomentum: Preserving LoRA Training Momentum in Federated Fine-Tuning", arXiv:2603.08014.

    client i:  trains A_i, B_i from the global A, B
    server:    D = sum_i p_i s_i B_i A_i = U S V^T
               B <- U_r (S_r / s)^(1/2),  A <- (S_r / s)^(1/2) V_r^T
               W <- W + U_rest S_rest V_rest^T

Exact: s B A and the rest are D. Unlike in FLoRA, training continues from the directions in which it moved.

Deviations: the paper takes a randomized SVD and drops the components beyond 99.99 % of the energy; here the SVD is
exact, from the stacked factors, and nothing is dropped. A client of a smaller rank r_i trains the first r_i components
while the others stay frozen beside them (as the pair L, U), so that it starts from the global model too; one of a
larger rank has further directions with A random and B = 0. D includes the frozen components. Moments are dropped every
round, because the factors are new ones; what the paper calls momentum is in the factors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch

from fedspan.core.aggregation import choose_smaller_form, map_layers, sum_products
from fedspan.core.base import Delta, Increment
from fedspan.core.factors import create_b_factors, create_lora_job, draw_a_factors, flatten_pairs, resize_factors
from fedspan.core.lowrank import LowRank, assign_values_to_B, balance_factors, concatenate, svd
from fedspan.core.method import Claims, Memory, RegisteredMethod
from fedspan.core.parametrization import PairSum
from fedspan.core.tensors import join_tensor_name, map_tensors
from fedspan.core.values import Client, Job, LayerSpec, Message, Reduced, ServerState, Weights


@final
@dataclass(frozen=True, kw_only=True)
class FedMomentum(RegisteredMethod):
    """Top components become the factors, the rest moves the base."""

    claims: ClassVar[Claims] = Claims(
        paper="FedMomentum: Preserving LoRA Training Momentum in Federated Fine-Tuning (arXiv:2603.08014)",
        exact=True,
        heterogeneous_ranks=True,
        reduction="stack",
        reinitializes=True,
        moves_base=True,
        sends_base=True,
    )

    def init(self, weights: Weights) -> ServerState:
        return ServerState(tensors={**draw_a_factors(self, self.r), **create_b_factors(self.spec, self.r)})

    def sync(self, state: ServerState, client: Client | None) -> Message:
        known_round = None if client is None else client.last_round
        return Message(state.tensors, {"generation": state.generation}, state.base.build_patch(known_round))

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        rank, scaling = self.get_rank(client), self.get_scaling(client)
        share = (self.get_scaling(None) / scaling) ** 0.5
        tensors = map_tensors(lambda factor: factor * share, resize_factors(self, message.tensors, rank))
        job = create_lora_job(self, tensors, client, ("A", "B"), int(message.scalars["generation"]))
        if rank >= self.r:
            return job
        for layer in self.spec.layers:
            tensors[join_tensor_name(layer.name, "L")] = message.tensors[join_tensor_name(layer.name, "B")][:, rank:]
            tensors[join_tensor_name(layer.name, "U")] = message.tensors[join_tensor_name(layer.name, "A")][rank:]
        pair_sum = PairSum(scaling, self.get_scaling(None))
        return replace(job, parametrization=dict.fromkeys(job.parametrization, pair_sum), tensors=tensors)

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        def split(layer: LayerSpec) -> tuple[LowRank, Delta]:
            U, S, Vt = svd(self._sum(layer.name, state, reduced))
            dtype = state.tensors[join_tensor_name(layer.name, "B")].dtype
            retained = balance_factors(U[:, : self.r], S[: self.r] / self.get_scaling(None), Vt[: self.r])
            rest = assign_values_to_B(U[:, self.r :], S[self.r :], Vt[self.r :])
            return retained.to(dtype), choose_smaller_form(rest).to(dtype).contiguous()

        parts = map_layers(split, self.spec.layers)
        increment = Increment(state.round + 1, {name: rest for name, (_, rest) in parts.items() if rest.numel()})
        return state.advance_round(
            tensors=flatten_pairs({name: retained for name, (retained, _) in parts.items()}),
            base=state.base.add(increment),
            generation=state.generation + 1,
        )

    def _sum(self, layer: str, state: ServerState, reduced: Reduced) -> LowRank:
        trained, frozen = sum_products(layer, reduced), self._sum_frozen(layer, state, reduced)
        return concatenate([trained, frozen]) if frozen.rank else trained

    def _sum_frozen(self, layer: str, state: ServerState, reduced: Reduced) -> LowRank:
        """Sum the frozen components with weights p_i: component j counts for the clients of rank j or less."""
        B, A = state.tensors[join_tensor_name(layer, "B")], state.tensors[join_tensor_name(layer, "A")]
        minimum = min(self.r, *(contribution.client.rank for contribution in reduced.stack))
        shares = [
            sum(contribution.weight for contribution in reduced.stack if contribution.client.rank <= j)
            for j in range(minimum, self.r)
        ]
        return LowRank(B[:, minimum:] * torch.tensor(shares, dtype=B.dtype), A[minimum:], self.get_scaling(None))
