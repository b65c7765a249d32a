"""LA-LoRA: FedIT whose clients train B and A in alternate local steps, with gradients smoothed after noise.

Liu et al., "Rethinking LoRA for Privacy-Preserving Federated Learning in Large Models", ICLR 2026, arXiv:2602.19926.

    client i, step 1, 3, ...:  A frozen;  B <- B - lr_B S(g_B)
              step 2, 4, ...:  B frozen;  A <- A - lr_A S(g_A)
    server:    A <- sum_i p_i A_i,   B <- sum_i p_i B_i

S convolves every row of A's gradient, and every column of B's, with the kernel (1, 4, 6, 4, 1) / 16. Under DP-SGD, g is
the sum of clipped gradients with its noise, so smoothing costs no privacy; and one factor is noisy at a time, so a step
adds no product of two noises. Not exact, as FedIT; a round of one local step trains B only.

Deviations: sources are the paper's abstract, a published summary of its text, and its code, which differs: it trains A
first, smooths by a two-dimensional Laplacian filter, takes that step beside an unsmoothed one, and clips to the median
norm of the batch's gradients, which has no guarantee. A later README of its repository (junkangLiu0/LA-LORA, 578e492)
says that it trains B first and smooths as above. Here the text is followed, and DP-SGD clips single examples.
``b_lr_scale`` is the code's ratio of the rates. The head trains in every step, as in the code, and is not smoothed.
Replies are weighted by examples. "Symmetric" padding is read as mirroring at the ends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

from fedspan.core.factors import create_b_factors, create_lora_job, draw_a_factors, list_tensor_names
from fedspan.core.method import Claims, Memory, RegisteredMethod
from fedspan.core.values import Client, Group, Job, Message, ServerState, Weights


@final
@dataclass(frozen=True, kw_only=True)
class LALoRA(RegisteredMethod):
    """Alternate between B and A in local steps.

    Args:
        b_lr_scale: Multiplier on the learning rate in steps that train B.
        smoothing: Whether gradients of A and B are smoothed along the layer's inputs and outputs.
    """

    claims: ClassVar[Claims] = Claims(
        paper="Rethinking LoRA for Privacy-Preserving Federated Learning in Large Models (ICLR 2026, arXiv:2602.19926)",
        exact=False,
    )

    b_lr_scale: float = 2.0
    smoothing: bool = True

    def init(self, weights: Weights) -> ServerState:
        return ServerState(tensors={**draw_a_factors(self, self.r), **create_b_factors(self.spec, self.r)})

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        job = create_lora_job(self, message.tensors, client, train=("A", "B"))
        B = Group(list_tensor_names(self.spec, "B"), lr_scale=self.b_lr_scale, turns=2, turn=0)
        A = Group(list_tensor_names(self.spec, "A"), turns=2, turn=1)
        if self.smoothing:
            B, A = replace(B, smoothed_axis=0), replace(A, smoothed_axis=1)
        return replace(job, trainable=(B, A))
