"""FedRot-LoRA: before they are averaged, the clients' factors are rotated into the frame of the global ones.

Zhang et al., "FedRot-LoRA: Mitigating Rotational Misalignment in Federated LoRA", ICML 2026, arXiv:2602.23638.

    client i:  trains A_i, B_i from the global A, B, then with R in SO(r) sends  B_i R,  R^T A_i  (the same product)
               odd rounds:  R* minimizes ||R^T A_i - A||_F;  even rounds:  R* minimizes ||B_i R - B||_F
               R = nearest rotation to (1 - lambda) I + lambda R*
    server:    A <- sum_i p_i R_i^T A_i,  B <- sum_i p_i B_i R_i

Factors are only determined up to a rotation; averaging misaligned ones cancels what they agree on. Not exact, but never
from misalignment. No more is transmitted than in FedIT.

The global factors are not rotated: their coordinates last from round to round, and with them what a server optimizer or
SCAFFOLD remembers of them.

Deviations: rounds are counted from 0, and no client rotates in round 0 (B is 0 and A common). The published code's
hard rotation leaves the determinant open; here R is a rotation as in the paper. Clients' stored moments are dropped
every round: averages are in another frame than the trained factors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import Tensor

from fedspan.core.alignment import find_nearest_rotation
from fedspan.core.factors import create_b_factors, create_lora_job, draw_a_factors
from fedspan.core.method import Claims, Memory, RegisteredMethod, declare_bounded, reply
from fedspan.core.tensors import join_tensor_name
from fedspan.core.values import Client, Job, Message, ServerState, Trained, Weights


@final
@dataclass(frozen=True, kw_only=True)
class FedRotLoRA(RegisteredMethod):
    """Align, then average A and B.

    Args:
        strength: The paper's lambda, from 0 (FedIT) to 1 (full rotation).
    """

    claims: ClassVar[Claims] = Claims(
        paper="FedRot-LoRA: Mitigating Rotational Misalignment in Federated LoRA (ICML 2026, arXiv:2602.23638)",
        exact=False,
    )

    strength: float = declare_bounded(0.5, 0.0, 1.0)

    def init(self, weights: Weights) -> ServerState:
        return ServerState(tensors={**draw_a_factors(self, self.r), **create_b_factors(self.spec, self.r)})

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        return create_lora_job(self, message.tensors, client, ("A", "B"), round)

    def finish(self, job: Job, trained: Trained, client: Client, memory: Memory, round: int) -> tuple[Message, Memory]:
        if round == 0:
            return reply(job, trained), memory
        rotated: dict[str, Tensor] = {}
        for layer in self.spec.layers:
            a, b = join_tensor_name(layer.name, "A"), join_tensor_name(layer.name, "B")
            A, B = trained.tensors[a].double(), trained.tensors[b].double()
            # R^T is the rotation that takes the client's factor to the global one.
            if round % 2:
                rotation = find_nearest_rotation(job.tensors[a].double() @ A.T)
            else:
                rotation = find_nearest_rotation(job.tensors[b].double().T @ B)
            Rt = find_nearest_rotation(torch.lerp(torch.eye(len(A), dtype=A.dtype), rotation, self.strength))
            rotated |= {a: (Rt @ A).to(trained.tensors[a].dtype), b: (B @ Rt.T).to(trained.tensors[b].dtype)}
        return reply(job, replace(trained, tensors={**trained.tensors, **rotated})), memory
