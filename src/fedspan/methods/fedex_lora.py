"""FedEx-LoRA: FedAvg of LoRA's two factors; the base takes up what the average loses.

Singhal et al., "FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Foundation Models", ACL 2025,
arXiv:2410.09432.

    client i:  trains A_i, B_i from the global A, B
    server:    A <- sum_i p_i A_i,  B <- sum_i p_i B_i,  W <- W + s (sum_i p_i B_i A_i - B A)

Exact. The residual equals ``s sum_{i<K} p_i (B_i - B)(A_i - A_K)`` and is transmitted as these factors of rank
(K - 1) r, or densely where that is fewer elements.

Deviations: the run's weights count (the paper's are uniform). The paper sends a dense residual; a truncated one is the
option ``residual_rank``. Different ranks are refused: the mean of their factors is not defined.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

from fedspan.core.aggregation import average_stack, choose_smaller_form, compute_residual, map_layers
from fedspan.core.base import Delta, Increment
from fedspan.core.factors import create_b_factors, create_lora_job, draw_a_factors
from fedspan.core.method import Claims, Memory, RegisteredMethod
from fedspan.core.tensors import join_tensor_name
from fedspan.core.values import Client, Job, LayerSpec, Message, Reduced, ServerState, Weights


@final
@dataclass(frozen=True, kw_only=True)
class FedExLoRA(RegisteredMethod):
    """Average factors; add the residual to the base.

    Args:
        residual_rank: Rank of the approximation sent instead of the whole residual (then not exact); None: the whole.
    """

    claims: ClassVar[Claims] = Claims(
        paper="FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning (ACL 2025, arXiv:2410.09432)",
        exact=True,
        reduction="stack",
        moves_base=True,
        sends_base=True,
    )

    residual_rank: int | None = None

    def declare_claims(self) -> Claims:
        return self.claims if self.residual_rank is None else replace(self.claims, exact=False)

    def init(self, weights: Weights) -> ServerState:
        return ServerState(tensors={**draw_a_factors(self, self.r), **create_b_factors(self.spec, self.r)})

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        return create_lora_job(self, message.tensors, client, train=("A", "B"))

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        means, s = average_stack(reduced), self.get_scaling(None)

        def compute_lost(layer: LayerSpec) -> Delta:
            return choose_smaller_form(
                compute_residual(layer.name, reduced, means[join_tensor_name(layer.name, "B")], s, self.residual_rank)
            )

        deltas = {name: delta for name, delta in map_layers(compute_lost, self.spec.layers).items() if delta.numel()}
        return state.advance_round(tensors=means, base=state.base.add(Increment(state.round + 1, deltas)))
