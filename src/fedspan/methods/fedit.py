"""FedIT: FedAvg of LoRA's two factors.

Zhang et al., "Towards Building the Federated GPT: Federated Instruction Tuning", ICASSP 2024, arXiv:2305.05644.

    client i:  trains A_i, B_i from the global A, B
    server:    A <- sum_i p_i A_i,   B <- sum_i p_i B_i

Not exact: the mean of products is not the product of means,
``sum_i p_i B_i A_i - B A = sum_i p_i (B_i - B)(A_i - A)``.

Deviations: none of substance. A's first distribution is an option: ``kaiming`` (PEFT's default, as in the published
code), ``gaussian``, ``orthonormal``. The published code builds a new optimizer every round; that is the run's option
``training.optimizer_state: reset`` (default).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from fedspan.core.factors import Init, create_b_factors, create_lora_job, draw_a_factors
from fedspan.core.method import Claims, Memory, RegisteredMethod
from fedspan.core.values import Client, Job, Message, ServerState, Weights


@final
@dataclass(frozen=True, kw_only=True)
class FedIT(RegisteredMethod):
    """Average A and B.

    Args:
        init_A: Distribution of the first A.
    """

    claims: ClassVar[Claims] = Claims(
        paper="Towards Building the Federated GPT: Federated Instruction Tuning (ICASSP 2024, arXiv:2305.05644)",
        exact=False,
    )

    init_A: Init = "kaiming"

    def init(self, weights: Weights) -> ServerState:
        A = draw_a_factors(self, self.r, init=self.init_A)
        return ServerState(tensors={**A, **create_b_factors(self.spec, self.r)})

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        return create_lora_job(self, message.tensors, client, train=("A", "B"))
