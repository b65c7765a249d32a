"""pFedLoRA (1) and (2): a global full-rank weight, averaged, and a personal pair that never leaves the client.

Park and Klabjan, arXiv:2409.12371, appendix C.4, algorithm 4 (after Wu et al. 2024):

    (1)  L_k, U_k <- argmin f_k(W_t + a_p L U) for E_per epochs, then                       (86)
         W_k <- argmin f_k(W + a_p L_k U_k) for E_global epochs                             (87)
    (2)  W_k, L_k, U_k <- argmin f_k(W + a_p L U) together for E_per + E_global epochs      (88)
    server:  W <- sum_k p_k W_k
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, final

from fedspan.core.factors import names
from fedspan.core.method import Claims, Memory, RegisteredMethod, Traffic
from fedspan.core.parametrization import DenseLoRA
from fedspan.core.tensors import select, tensor_name
from fedspan.core.values import (
    Client,
    Contribution,
    Group,
    Job,
    LayerSpec,
    Message,
    Reduced,
    ServerState,
    Trained,
    Weights,
)

from .pfedloru import GLOBAL, PERSONAL, personal_pair

JOINT = "joint"


@final
@dataclass(frozen=True, kw_only=True)
class PFedLoRA(RegisteredMethod):
    """Average whole weights; keep a personal pair.

    Args:
        variant: 1 trains the pair and then the weight, 2 both together.
        personal_r: rank of L U.
        personal_scaling: a_p.
        personal_epochs: E_per.
        global_epochs: E_global.
    """

    claims: ClassVar[Claims] = Claims(
        paper="pFedLoRA (arXiv:2409.12371, after arXiv:2310.13283)", exact=True, personal=True, adapter=False
    )

    variant: Literal[1, 2] = 1
    personal_r: int = 1
    personal_scaling: float = 1.0
    personal_epochs: int = 2
    global_epochs: int = 3

    def init(self, weights: Weights) -> ServerState:
        return ServerState(tensors={tensor_name(one.name, "W"): weights.weight(one.name) for one in self.spec.layers})

    def sync(self, state: ServerState, client: Client | None) -> Message:
        return Message(state.tensors)

    def start(self, message: Message, client: Client | None, memory: Memory) -> Job:
        own = memory or personal_pair(self.spec, self.personal_r, self.seed, client)
        job = Job(
            parametrization={layer.name: DenseLoRA(self.personal_scaling) for layer in self.spec.layers},
            tensors={**message.tensors, **own},
            trainable=(Group(names(self.spec, "L", "U")),),
            epochs=self.personal_epochs,
            phase=PERSONAL,
        )
        if self.variant == 1:
            return job
        groups = (Group(names(self.spec, "W", "L", "U")),)
        return replace(job, trainable=groups, epochs=self.personal_epochs + self.global_epochs, phase=JOINT)

    def finish(self, job: Job, trained: Trained, client: Client, memory: Memory) -> tuple[Job | Message, Memory]:
        if job.phase == PERSONAL:
            groups = (Group(names(self.spec, "W")),)
            epochs = self.global_epochs
            return replace(job, tensors=trained.tensors, trainable=groups, epochs=epochs, phase=GLOBAL), memory
        shared = select(trained.tensors, names(self.spec, "W"))
        return Message(shared), select(trained.tensors, names(self.spec, "L", "U"))

    def contribute(self, message: Message, client: Client) -> Contribution:
        return Contribution(sum=message.tensors)

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        return state.next(tensors=reduced.mean)

    def traffic(self, layer: LayerSpec, rank: int, cohort: Sequence[int], round: int) -> Traffic:
        whole = layer.out_features * layer.in_features
        return Traffic(down=whole, up=whole)
