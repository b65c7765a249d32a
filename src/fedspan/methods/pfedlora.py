"""pFedLoRA: average whole weights; every client adds a low-rank pair of its own.

Variants (1), after Wu et al. 2024 (FedLoRA), and (2) as they stand in Park and Klabjan, "Communication-Efficient
Federated Low-Rank Update Algorithm and its Connection to Implicit Regularization", arXiv:2409.12371, appendix C.4,
algorithm 4.

    (1)  L_k, U_k <- argmin f_k(W + s_k L U) for E_per epochs, then                  (eq. 86)
         W_k <- argmin f_k(W + s_k L_k U_k) for E_global epochs                      (eq. 87)
    (2)  W_k, L_k, U_k <- argmin f_k(W + s_k L U) together                           (eq. 88)
    server:  W <- sum_k p_k W_k

L_k, U_k never leave the client. The shared W is the exact mean; the clients' models W + s_k L_k U_k differ.

Deviations: E_per is ``personal_epochs``; the rest is the run's local training: E_global in (1), the one phase of (2),
where the paper takes E_per + E_global epochs. How L, U start is not said: as LoRA, L = 0 and U random. In (1) what
trains beside the target layers rests while L, U train: its parameters stay as they are; norms are in training mode all
the same, and their statistics follow ``model.extras``. The pair has the client's rank and scaling, so ranks may
differ. Only the target modules have a trained W and a pair. The global model is W without a pair.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, final

from fedspan.core.factors import draw_personal_pair, list_tensor_names
from fedspan.core.method import Claims, Memory, RegisteredMethod
from fedspan.core.parametrization import DenseLoRA
from fedspan.core.tensors import join_tensor_name, select
from fedspan.core.values import Client, Group, Job, Message, ServerState, Trained, Weights

PERSONAL = "personal"


@final
@dataclass(frozen=True, kw_only=True)
class PFedLoRA(RegisteredMethod):
    """Average whole weights; keep a personal pair.

    Args:
        variant: 1 trains the pair and then the weight, 2 both together.
        personal_epochs: Passes over a client's examples in which the pair trains, before the weight does (variant 1).
    """

    claims: ClassVar[Claims] = Claims(
        paper="Communication-Efficient Federated Low-Rank Update Algorithm and its Connection to Implicit "
        "Regularization (arXiv:2409.12371)",
        exact=False,
        personal=True,
        heterogeneous_ranks=True,
    )

    variant: Literal[1, 2] = 1
    personal_epochs: int = 1

    def init(self, weights: Weights) -> ServerState:
        return ServerState(
            tensors={join_tensor_name(layer.name, "W"): weights.get_weight(layer.name) for layer in self.spec.layers}
        )

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        personal = memory or draw_personal_pair(self, self.get_rank(client), client)
        is_joint = self.variant == 2
        return Job(
            parametrization={layer.name: DenseLoRA(self.get_scaling(client)) for layer in self.spec.layers},
            tensors={**message.tensors, **personal},
            trainable=(Group(list_tensor_names(self.spec, *(("W", "L", "U") if is_joint else ("L", "U")))),),
            epochs=None if is_joint else self.personal_epochs,
            phase="train" if is_joint else PERSONAL,
            extras=is_joint,
        )

    def finish(
        self, job: Job, trained: Trained, client: Client, memory: Memory, round: int
    ) -> tuple[Job | Message, Memory]:
        if job.phase == PERSONAL:
            shared = (Group(list_tensor_names(self.spec, "W")),)
            tensors = trained.tensors
            return replace(job, tensors=tensors, trainable=shared, epochs=None, phase="train", extras=True), memory
        personal = select(trained.tensors, list_tensor_names(self.spec, "L", "U"))
        return Message(select(trained.tensors, list_tensor_names(self.spec, "W"))), personal

    def list_added_epochs(self) -> tuple[int, ...]:
        return (self.personal_epochs,) if self.variant == 1 else ()
