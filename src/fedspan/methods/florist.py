"""FLoRIST: FLoRA whose sum is truncated to the smallest rank that holds a share of its energy.

Ramesh and Dass, "FLoRIST: Singular Value Thresholding for Efficient and Accurate Federated Fine-Tuning of Large
Language Models", MLSys 2026, arXiv:2506.09199.

    client i:  trains A_i, B_i of its own rank r_i from A_i random, B_i = 0
    server:    sum_i p_i s_i B_i A_i = U S V^T from the stacked factors
               W <- W + U_p S_p V_p^T with the smallest p for which S_1^2 + ... + S_p^2 >= t (S_1^2 + S_2^2 + ...)

The squared error of a round is at most 1 - t of the squared norm of the exact sum, layer by layer; t = 1 is
FLoRA.

Deviations: public code (INFO-698-InfoSci-Capstone/federated-llm-optimization) decomposes the dense sum of the products;
here it is a QR of each stack and an SVD of their core, with the same result. In the paper every client has the scaling
2, as lora_alpha = 2 r_i; here s_i p_i is folded into B_i. t is not chosen: the paper's two variants are its best value
and its smallest good one in each experiment (0.80 to 0.99). A_i is drawn from (seed, round, client).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from fedspan.core.aggregation import choose_smaller_form, map_layers, sum_products
from fedspan.core.base import Delta, Increment
from fedspan.core.factors import create_restarted_lora_job
from fedspan.core.lowrank import assign_values_to_B, find_energy_rank, svd
from fedspan.core.method import Claims, Memory, RegisteredMethod, declare_bounded
from fedspan.core.values import Client, Job, LayerSpec, Message, Reduced, ServerState, Weights


@final
@dataclass(frozen=True, kw_only=True)
class FLoRIST(RegisteredMethod):
    """Stack factors, truncate by energy into the base; re-initialize.

    Args:
        threshold: Share of the squared singular values that each layer's update retains.
    """

    claims: ClassVar[Claims] = Claims(
        paper="FLoRIST: Singular Value Thresholding for Efficient and Accurate Federated Fine-Tuning of Large Language "
        "Models (MLSys 2026, arXiv:2506.09199)",
        exact=False,
        heterogeneous_ranks=True,
        reduction="stack",
        reinitializes=True,
        moves_base=True,
        sends_base=True,
        sends="other",
        adaptive_rank=True,
    )

    threshold: float = declare_bounded(0.9, 0.0, 1.0)

    def init(self, weights: Weights) -> ServerState:
        return ServerState()

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        return create_restarted_lora_job(self, client, round)

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        def truncate(layer: LayerSpec) -> Delta:
            stack = sum_products(layer.name, reduced)
            U, S, Vt = svd(stack)
            rank = find_energy_rank(S, self.threshold)
            pair = assign_values_to_B(U[:, :rank], S[:rank], Vt[:rank])
            return choose_smaller_form(pair.to(stack.B.dtype).contiguous())

        base = state.base.add(Increment(state.round + 1, map_layers(truncate, self.spec.layers)))
        return state.advance_round(base=base, generation=state.generation + 1)
