"""FeDeRA: FedIT whose factors begin as the principal singular vectors of the pretrained weights.

Yan et al., "FeDeRA: Efficient Fine-tuning of Language Models in Federated Learning Leveraging Weight Decomposition",
arXiv:2404.18848.

    once:      W0 = U S V^T;  B = U_r (S_r / s)^(1/2),  A = (S_r / s)^(1/2) V_r^T,  W <- W0 - s B A
    client i:  trains A_i, B_i from the global A, B
    server:    A <- sum_i p_i A_i,  B <- sum_i p_i B_i

Not exact, for the same reason as FedIT. Both factors have gradients from the first step, because B is not 0.

Deviations: the server decomposes once and sends all clients the same A, B and the change of the base (SVDs on the
clients would not have the same bits). Other authors describe the server as averaging products and decomposing them
again; that is ``aggregation: product_svd``, where what lies beyond rank r is lost and moments are dropped every round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, final

from fedspan.core.aggregation import map_layers, sum_products
from fedspan.core.base import BaseUpdate
from fedspan.core.factors import Singular, compute_principal_factors, create_lora_job, flatten_pairs
from fedspan.core.lowrank import LowRank, balance_factors, svd
from fedspan.core.method import Claims, Memory, RegisteredMethod
from fedspan.core.values import Client, Job, LayerSpec, Message, Reduced, ServerState, Weights


@final
@dataclass(frozen=True, kw_only=True)
class FeDeRA(RegisteredMethod):
    """Average factors that begin as the weights' principal part.

    Args:
        aggregation: ``factors`` (paper) averages A and B; ``product_svd`` averages s B A and keeps its best rank r.
        singular: ``full`` SVD of every weight, or ``randomized`` for large layers.
    """

    claims: ClassVar[Claims] = Claims(
        paper="FeDeRA: Efficient Fine-tuning of Language Models in Federated Learning Leveraging Weight Decomposition "
        "(arXiv:2404.18848)",
        exact=False,
        sends_base=True,
    )

    aggregation: Literal["factors", "product_svd"] = "factors"
    singular: Singular = "full"

    def declare_claims(self) -> Claims:
        if self.aggregation == "factors":
            return self.claims
        return replace(self.claims, reduction="stack", reinitializes=True)

    def init(self, weights: Weights) -> ServerState:
        tensors, increment = compute_principal_factors(self, weights, self.singular)
        return ServerState(tensors=tensors, base=BaseUpdate().add(increment))

    def sync(self, state: ServerState, client: Client | None) -> Message:
        known_round = None if client is None else client.last_round
        return Message(state.tensors, {"generation": state.generation}, state.base.build_patch(known_round))

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        return create_lora_job(self, message.tensors, client, ("A", "B"), int(message.scalars["generation"]))

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        if self.aggregation == "factors":
            return state.advance_round(tensors=reduced.mean)

        def decompose(layer: LayerSpec) -> LowRank:
            stacked = sum_products(layer.name, reduced)
            U, S, Vt = svd(stacked, self.r)
            return balance_factors(U, S / self.get_scaling(None), Vt).to(stacked.B.dtype)

        tensors = flatten_pairs(map_layers(decompose, self.spec.layers))
        return state.advance_round(tensors=tensors, generation=state.generation + 1)
