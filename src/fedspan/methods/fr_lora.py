"""FR-LoRA: every round starts from the weights' principal factors, and the learned change moves into the base.

Yan et al., "Federated Residual Low-Rank Adaption of Large Language Models", ICLR 2025,
https://openreview.net/forum?id=e0rQRMUhs7.

    once:      W0 = U S V^T;  B0 = U_r (S_r / s)^(1/2),  A0 = (S_r / s)^(1/2) V_r^T,  W <- W0 - s B0 A0
    client i:  trains A_i, B_i from A0, B0 on top of W
    server:    A = sum_i p_i A_i,  B = sum_i p_i B_i,  W <- W + s (B A - B0 A0)

The update's rank grows by up to 2 r a round. Exact only where B alone trains: then A = A0 for everybody.

Deviations: the paper trains both factors, the published code freezes A: the option ``train``. The code uses
uniform weights; here the run's weights count. It retains Adam's moments although the factors are reset; here they are
dropped. The change is transmitted as the factors [B - B0, B0] and [A; A - A0], 2 r (m + n) elements, where the paper's
clients compute it from A and B: a client that was absent can then be sent the changes that it missed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, final

import torch

from fedspan.core.aggregation import choose_smaller_form
from fedspan.core.base import BaseUpdate, Delta, Increment
from fedspan.core.factors import Singular, compute_principal_factors, create_lora_job, list_tensor_names
from fedspan.core.lowrank import LowRank
from fedspan.core.method import Claims, Memory, RegisteredMethod, reply
from fedspan.core.tensors import join_tensor_name, select
from fedspan.core.values import Client, Job, Message, Reduced, ServerState, Trained, Weights


@final
@dataclass(frozen=True, kw_only=True)
class FRLoRA(RegisteredMethod):
    """Average factors, lift their change into the base, start again.

    Args:
        train: ``both`` factors (paper), or ``B`` under the frozen A0 (published code).
        singular: ``full`` SVD of every weight, or ``randomized`` for large layers.
    """

    claims: ClassVar[Claims] = Claims(
        paper="Federated Residual Low-Rank Adaption of Large Language Models (ICLR 2025)",
        exact=False,
        reinitializes=True,
        moves_base=True,
        sends_base=True,
    )

    train: Literal["both", "B"] = "both"
    singular: Singular = "full"

    def declare_claims(self) -> Claims:
        return self.claims if self.train == "both" else replace(self.claims, exact=True)

    def init(self, weights: Weights) -> ServerState:
        tensors, increment = compute_principal_factors(self, weights, self.singular)
        return ServerState(tensors=tensors, base=BaseUpdate().add(increment))

    def sync(self, state: ServerState, client: Client | None) -> Message:
        known_round = None if client is None else client.last_round
        tensors = state.tensors if known_round is None else {}  # A0 and B0 never change
        return Message(tensors, {"generation": state.generation}, state.base.build_patch(known_round))

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        slots = ("A", "B") if self.train == "both" else ("B",)
        return create_lora_job(self, {**memory, **message.tensors}, client, slots, int(message.scalars["generation"]))

    def finish(self, job: Job, trained: Trained, client: Client, memory: Memory, round: int) -> tuple[Message, Memory]:
        return reply(job, trained), select(job.tensors, list_tensor_names(self.spec, "A", "B"))

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        deltas = {layer.name: self._compute_learned(layer.name, state, reduced) for layer in self.spec.layers}
        base = state.base.add(Increment(state.round + 1, deltas))
        return state.advance_round(base=base, generation=state.generation + 1)

    def _compute_learned(self, layer: str, state: ServerState, reduced: Reduced) -> Delta:
        """Compute ``s (B A - B0 A0)`` from differences, so that no large terms cancel."""
        a, b = join_tensor_name(layer, "A"), join_tensor_name(layer, "B")
        A0, B0, B = state.tensors[a], state.tensors[b], reduced.mean[b]
        if self.train == "B":
            return choose_smaller_form(LowRank(B - B0, A0, self.get_scaling(None)))
        A = reduced.mean[a]
        return choose_smaller_form(LowRank(torch.cat([B - B0, B0], 1), torch.cat([A, A - A0]), self.get_scaling(None)))
