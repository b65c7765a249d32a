"""pFedLoRU: FedLoRU's shared pair, and a personal pair that never leaves the client.

Park and Klabjan, "Communication-Efficient Federated Low-Rank Update Algorithm and its Connection to Implicit
Regularization", arXiv:2409.12371, appendix C.2, algorithm 2.

    client k:  L_k, U_k <- argmin f_k(W + s B A + s_p L_k U_k)   for E_per epochs, A and B fixed         (eq. 82)
               A_k, B_k <- argmin f_k(W + s B A + s_p L_k U_k)   for E_global epochs, L_k and U_k fixed  (eq. 83)
    server:    as FedLoRU: A, B averaged; W <- W + s B A and A, B re-initialized every tau rounds

Everything on the server is FedLoRU's own; only the client has a second pair and a second phase.

Deviations: E_per is ``personal_epochs``; E_global is the run's local training. The paper does not say how L, U start:
as LoRA, L = 0 and U random. What trains beside the target layers belongs to the global model and rests while L, U
train: its parameters stay as they are; norms are in training mode all the same, as algorithm 2 knows no other, and
their statistics follow ``model.extras``. The paper allows personal ranks that differ by client; here all clients have
``personal_r``. The global model, which the paper does not evaluate, is the one without a personal part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

from fedspan.core.factors import draw_personal_pair, list_tensor_names
from fedspan.core.method import Claims, Memory, compute_scaling, reply
from fedspan.core.parametrization import PairSum
from fedspan.core.tensors import select
from fedspan.core.values import Client, Group, Job, Message, Trained
from fedspan.methods.fedloru import FedLoRU

PERSONAL = "personal"


@final
@dataclass(frozen=True, kw_only=True)
class PFedLoRU(FedLoRU):
    """FedLoRU with a personal pair.

    Args:
        personal_r: Rank of L U.
        personal_alpha: Numerator of the personal scaling s_p = personal_alpha / personal_r.
        personal_epochs: Passes over a client's examples in which L and U train, before A and B do.
    """

    claims: ClassVar[Claims] = replace(FedLoRU.claims, personal=True)

    personal_r: int = 4
    personal_alpha: float = 8.0
    personal_epochs: int = 1

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        job = super().start(message, client, {}, round)
        personal = memory or draw_personal_pair(self, self.personal_r, client)
        personal_scaling = compute_scaling(self.personal_alpha, self.personal_r, self.use_rslora)
        parametrization = PairSum(self.get_scaling(client), personal_scaling)
        return replace(
            job,
            parametrization={layer.name: parametrization for layer in self.spec.layers},
            tensors={**job.tensors, **personal},
            trainable=(Group(list_tensor_names(self.spec, "L", "U")),),
            epochs=self.personal_epochs,
            phase=PERSONAL,
            extras=False,
        )

    def finish(
        self, job: Job, trained: Trained, client: Client, memory: Memory, round: int
    ) -> tuple[Job | Message, Memory]:
        if job.phase == PERSONAL:
            shared = (Group(list_tensor_names(self.spec, "A", "B")),)
            tensors = trained.tensors
            return replace(job, tensors=tensors, trainable=shared, epochs=None, phase="train", extras=True), memory
        return reply(job, trained), select(trained.tensors, list_tensor_names(self.spec, "L", "U"))

    def list_added_epochs(self) -> tuple[int, ...]:
        return (self.personal_epochs,)
