"""FedSVD: FFA-LoRA whose frozen A is renewed every round from the SVD of the product.

Lee et al., "FedSVD: Adaptive Orthogonalization for Private Federated Learning with LoRA", NeurIPS 2025,
arXiv:2505.12805.

    client i:  trains B_i from the global B under the frozen A
    server:    B <- sum_i p_i B_i;   B A = U S V^T;   A <- V_r^T,  B <- U_r S_r

Exact: the product does not change. The SVD is that of the factors, never of an O x I matrix. A keeps its row space, so
under plain SGD this is FFA-LoRA with an orthonormal A, weight for weight; under Adam, momentum or decay it is not.

Deviations: the paper freezes the head; here it follows ``model.extras``. The first A is ``init_A`` as in FFA-LoRA.
Momentum and moments are dropped every round, because B's columns are rotated. The paper's private training is omitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from fedspan.core.aggregation import map_layers
from fedspan.core.factors import Init, create_b_factors, create_lora_job, draw_a_factors, flatten_pairs
from fedspan.core.lowrank import LowRank, assign_values_to_B, svd
from fedspan.core.method import Claims, Memory, RegisteredMethod
from fedspan.core.tensors import join_tensor_name
from fedspan.core.values import Client, Job, LayerSpec, Message, Reduced, ServerState, Weights


@final
@dataclass(frozen=True, kw_only=True)
class FedSVD(RegisteredMethod):
    """Average B under an A that the server renews.

    Args:
        init_A: Distribution of A in the first round.
    """

    claims: ClassVar[Claims] = Claims(
        paper="FedSVD: Adaptive Orthogonalization for Private Federated Learning with LoRA "
        "(NeurIPS 2025, arXiv:2505.12805)",
        exact=True,
        reinitializes=True,
    )

    init_A: Init = "kaiming"

    def init(self, weights: Weights) -> ServerState:
        return ServerState(
            tensors={**draw_a_factors(self, self.r, init=self.init_A), **create_b_factors(self.spec, self.r)}
        )

    def sync(self, state: ServerState, client: Client | None) -> Message:
        return Message(state.tensors, {"generation": state.generation})

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        return create_lora_job(self, message.tensors, client, ("B",), int(message.scalars["generation"]))

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        def decompose(layer: LayerSpec) -> LowRank:
            B, A = reduced.mean[join_tensor_name(layer.name, "B")], state.tensors[join_tensor_name(layer.name, "A")]
            return assign_values_to_B(*svd(LowRank(B, A))).to(B.dtype)

        pairs = map_layers(decompose, self.spec.layers)
        return state.advance_round(tensors=flatten_pairs(pairs), generation=state.generation + 1)
