"""RoLoRA: train and average one factor at a time, B in even rounds (counted from 0), A in odd ones.

Chen et al., "Robust Federated Finetuning of LLMs via Alternating Optimization of LoRA", NeurIPS 2025,
arXiv:2502.01755.

    round 0, 2, ...:  A frozen;  B <- sum_i p_i B_i
    round 1, 3, ...:  B frozen;  A <- sum_i p_i A_i

Exact every round, because the other factor is the same for all clients. With B = 0 the gradient of A vanishes, so B
comes first. A client is sent only the factors that changed since it last participated; it stores the others.

Deviations: the paper's letters are transposed (its A is our A^T, its B our B^T). It averages plainly
(``federation.weights: uniform``); here replies are weighted by examples. The paper is silent on the head; the
supplement's code freezes it at step 0; here it follows ``model.extras`` (default ``average``). The first A is Gaussian
in the paper's network for MNIST (section 5.2), of a variance that it does not give, and not described for language
models: ``init_A`` is ``kaiming`` (PEFT's default), ``gaussian`` (PEFT's, N(0, 1/r^2)) or ``orthonormal``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from fedspan.core.factors import (
    Init,
    create_b_factors,
    create_lora_job,
    draw_a_factors,
    get_alternating_factor,
    list_alternating_factors,
    list_tensor_names,
)
from fedspan.core.method import Claims, Memory, RegisteredMethod, reply
from fedspan.core.tensors import select
from fedspan.core.values import Client, Job, Message, Reduced, ServerState, Trained, Weights


@final
@dataclass(frozen=True, kw_only=True)
class RoLoRA(RegisteredMethod):
    """Alternate between B and A.

    Args:
        init_A: Distribution of the first A.
    """

    claims: ClassVar[Claims] = Claims(
        paper="Robust Federated Finetuning of LLMs via Alternating Optimization of LoRA "
        "(NeurIPS 2025, arXiv:2502.01755)",
        exact=True,
    )

    init_A: Init = "kaiming"

    def init(self, weights: Weights) -> ServerState:
        return ServerState(tensors=self._draw_initial())

    def _draw_initial(self) -> dict[str, Tensor]:
        return {**draw_a_factors(self, self.r, init=self.init_A), **create_b_factors(self.spec, self.r)}

    def sync(self, state: ServerState, client: Client | None) -> Message:
        slots = list_alternating_factors(state.round, None if client is None else client.last_round)
        return Message(select(state.tensors, list_tensor_names(self.spec, *slots)))

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        tensors = {**(memory or self._draw_initial()), **message.tensors}
        return create_lora_job(self, tensors, client, train=(get_alternating_factor(round),))

    def finish(self, job: Job, trained: Trained, client: Client, memory: Memory, round: int) -> tuple[Message, Memory]:
        return reply(job, trained), select(job.tensors, list_tensor_names(self.spec, "A", "B"))

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        return state.advance_round(tensors={**state.tensors, **reduced.mean})
