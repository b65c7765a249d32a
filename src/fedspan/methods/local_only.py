"""Local-only training: every client trains LoRA alone; the lower bound that a federation must beat.

    client i:  trains A_i, B_i and its own head, from where it left off

Deviations: none; it is a baseline, not a paper's method.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from fedspan.core.factors import create_b_factors, create_lora_job, draw_a_factors
from fedspan.core.method import Claims, Memory, RegisteredMethod
from fedspan.core.values import Client, Contribution, Job, Message, Reduced, ServerState, Trained, Weights


@final
@dataclass(frozen=True, kw_only=True)
class LocalOnly(RegisteredMethod):
    """No communication at all."""

    claims: ClassVar[Claims] = Claims(
        paper="baseline: each client alone",
        exact=False,
        personal=True,
        heterogeneous_ranks=True,
        extras="local",
        sends="nothing",
    )

    def init(self, weights: Weights) -> ServerState:
        return ServerState()

    def sync(self, state: ServerState, client: Client | None) -> Message:
        return Message()

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        rank = self.get_rank(client)
        personal = memory or {**draw_a_factors(self, rank), **create_b_factors(self.spec, rank)}
        return create_lora_job(self, personal, client, train=("A", "B"))

    def finish(self, job: Job, trained: Trained, client: Client, memory: Memory, round: int) -> tuple[Message, Memory]:
        return Message(), trained.tensors

    def contribute(self, message: Message, client: Client) -> Contribution:
        return Contribution()

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        return state.advance_round()
