"""FFA-LoRA: freeze A, train and average B.

Sun et al., "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024, arXiv:2403.12313.

    A = A0 for all clients and rounds (drawn from the shared seed, not transmitted)
    client i:  trains B_i from the global B
    server:    B <- sum_i p_i B_i

Exact: ``sum_i p_i B_i A0 = B A0``.

Deviations: the paper freezes the classification head; here the head follows the run's ``model.extras`` policy, which is
``average`` unless the user says otherwise (a head that is random and frozen caps accuracy on a new label set).
A0's distribution is an option: ``kaiming`` (published ports, default), ``gaussian`` (paper), ``orthonormal``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from fedspan.core.factors import Init, create_b_factors, create_lora_job, draw_a_factors
from fedspan.core.method import Claims, Memory, RegisteredMethod
from fedspan.core.values import Client, Job, Message, ServerState, Weights


@final
@dataclass(frozen=True, kw_only=True)
class FFALoRA(RegisteredMethod):
    """Average B under one frozen A.

    Args:
        init_A: Distribution of the frozen A.
    """

    claims: ClassVar[Claims] = Claims(
        paper="Improving LoRA in Privacy-preserving Federated Learning (ICLR 2024, arXiv:2403.12313)",
        exact=True,
    )

    init_A: Init = "kaiming"

    def init(self, weights: Weights) -> ServerState:
        return ServerState(tensors=create_b_factors(self.spec, self.r))

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        frozen = draw_a_factors(self, self.r, init=self.init_A)
        return create_lora_job(self, {**frozen, **message.tensors}, client, train=("B",))
