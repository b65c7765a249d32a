"""FedSA-LoRA: share A, keep B on the client.

Guo et al., "Selective Aggregation for Low-Rank Adaptation in Federated Learning", ICLR 2025, arXiv:2410.01463.

    client i:  trains A_i (from the global A) and its own B_i
    server:    A <- sum_i p_i A_i

Personal: B_i and, by default, the head stay on the client. The mean of A is the plain average; the clients' weights
``B_i A`` differ, so there is no global model, and aggregation is not exact in the sense of ``sum p_i B_i A_i``.

Deviations: a client that has never participated has B = 0 (the paper does not say).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from fedspan.core.factors import create_b_factors, create_lora_job, draw_a_factors, list_tensor_names
from fedspan.core.method import Claims, Memory, RegisteredMethod
from fedspan.core.tensors import select
from fedspan.core.values import Client, Job, Message, ServerState, Trained, Weights


@final
@dataclass(frozen=True, kw_only=True)
class FedSALoRA(RegisteredMethod):
    """Average A; B stays on every client."""

    claims: ClassVar[Claims] = Claims(
        paper="Selective Aggregation for Low-Rank Adaptation in Federated Learning (ICLR 2025, arXiv:2410.01463)",
        exact=False,
        personal=True,
        extras="local",
    )

    def init(self, weights: Weights) -> ServerState:
        return ServerState(tensors=draw_a_factors(self, self.r))

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        personal = memory or create_b_factors(self.spec, self.r)
        return create_lora_job(self, {**personal, **message.tensors}, client, train=("A", "B"))

    def finish(self, job: Job, trained: Trained, client: Client, memory: Memory, round: int) -> tuple[Message, Memory]:
        shared = select(trained.tensors, list_tensor_names(self.spec, "A"))
        return Message(shared), select(trained.tensors, list_tensor_names(self.spec, "B"))
