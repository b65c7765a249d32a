"""FLoRA: stack the clients' factors, add the exact sum to the base, start every round with fresh factors.

Wang et al., "FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank Adaptations",
NeurIPS 2024, arXiv:2409.05976.

    client i:  trains A_i, B_i of its own rank r_i from A_i random, B_i = 0
    server:    W <- W + sum_i p_i s_i B_i A_i = W + [s_1 p_1 B_1, ...] [A_1; ...]     (rank sum_i r_i)

Exact for any ranks and scalings: the weight p_i and the scaling s_i stand on one factor of each product.

Deviations: the published code keeps s_i equal for all clients by its choice of alphas; here s_i p_i is folded into B_i,
so that unequal scalings are exact too. A_i is drawn from (seed, round, client): clients need not share it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from fedspan.core.aggregation import choose_smaller_form, map_layers, sum_products
from fedspan.core.base import Increment
from fedspan.core.factors import create_restarted_lora_job
from fedspan.core.method import Claims, Memory, RegisteredMethod
from fedspan.core.values import Client, Job, Message, Reduced, ServerState, Weights


@final
@dataclass(frozen=True, kw_only=True)
class FLoRA(RegisteredMethod):
    """Stack factors into the base; re-initialize."""

    claims: ClassVar[Claims] = Claims(
        paper="FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank Adaptations "
        "(NeurIPS 2024, arXiv:2409.05976)",
        exact=True,
        heterogeneous_ranks=True,
        reduction="stack",
        reinitializes=True,
        moves_base=True,
        sends_base=True,
        sends="other",
    )

    def init(self, weights: Weights) -> ServerState:
        return ServerState()

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        return create_restarted_lora_job(self, client, round)

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        deltas = map_layers(lambda layer: choose_smaller_form(sum_products(layer.name, reduced)), self.spec.layers)
        base = state.base.add(Increment(state.round + 1, deltas))
        return state.advance_round(base=base, generation=state.generation + 1)
