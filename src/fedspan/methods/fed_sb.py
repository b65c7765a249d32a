"""Fed-SB: clients train only an r x r matrix between two fixed factors that a first gradient determines.

Singhal et al., "Fed-SB: A Silver Bullet for Extreme Communication Efficiency and Performance in (Private) Federated
LoRA Fine-Tuning", arXiv:2502.15436, after LoRA-SB, arXiv:2411.19557.

    round 0:       client i sends the gradient G_i of its loss by W0;  no step is taken
                   server: -init_step * sign(sum_i p_i G_i) ~= U_r S_r V_r^T;  B = U_r,  A = V_r^T,  R = S_r / s
    round 1, ...:  client i trains R_i in W0 + s B R A;  server: R <- sum_i p_i R_i

Exact, because B and A are the same for all clients. The product is not subtracted from W0: training begins one step
ahead.

Deviations: the paper uses uniform weights (``federation.weights: uniform``). It computes the gradient once, centrally,
from a few samples; here the first round computes it: the selected clients send the whole gradient over all their
examples, so that the sign is that of the sum and no example leaves its client. That round transmits O I elements per
layer to the server. The step size is an option; the published code uses the learning rate divided by the number of
warm-up steps. Factors stay in float32, where that code rounds them to bf16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from fedspan.core.factors import list_tensor_names
from fedspan.core.lowrank import compute_leading_svd
from fedspan.core.method import Claims, Memory, RegisteredMethod, reply
from fedspan.core.parametrization import Core, DenseChange
from fedspan.core.tensors import Tensors, join_tensor_name, select
from fedspan.core.values import Client, Group, Job, Message, Reduced, ServerState, Trained, Weights

PROBE = "probe"


@final
@dataclass(frozen=True, kw_only=True)
class FedSB(RegisteredMethod):
    """Average R between fixed B and A.

    Args:
        init_step: Size of the first step along the gradient's signs; B R A starts as its principal part.
    """

    claims: ClassVar[Claims] = Claims(
        paper="Fed-SB: A Silver Bullet for Extreme Communication Efficiency and Performance in (Private) Federated "
        "LoRA Fine-Tuning (arXiv:2502.15436)",
        exact=True,
        sends="other",
    )

    init_step: float = 1e-4

    def init(self, weights: Weights) -> ServerState:
        return ServerState()

    def sync(self, state: ServerState, client: Client | None) -> Message:
        if not state.round:
            return Message()
        has_factors = client is not None and client.last_round is not None and client.last_round > 0
        slots = ("R",) if has_factors else ("A", "B", "R")
        return Message(select(state.tensors, list_tensor_names(self.spec, *slots)))

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        if not round:
            return Job(
                parametrization={layer.name: DenseChange() for layer in self.spec.layers},
                tensors={join_tensor_name(layer.name, "D"): torch.zeros(layer.shape) for layer in self.spec.layers},
                trainable=(Group(list_tensor_names(self.spec, "D")),),
                steps=0,
                phase=PROBE,
                extras=False,
            )
        return Job(
            parametrization={layer.name: Core(self.get_scaling(client)) for layer in self.spec.layers},
            tensors={**memory, **message.tensors},
            trainable=(Group(list_tensor_names(self.spec, "R")),),
        )

    def finish(self, job: Job, trained: Trained, client: Client, memory: Memory, round: int) -> tuple[Message, Memory]:
        if job.phase == PROBE:
            gradients = {layer.name: trained.gradient[join_tensor_name(layer.name, "D")] for layer in self.spec.layers}
            return Message({join_tensor_name(layer, "gradient"): value for layer, value in gradients.items()}), memory
        return reply(job, trained), select(job.tensors, list_tensor_names(self.spec, "A", "B"))

    def list_added_epochs(self) -> tuple[int, ...]:
        return (1,)  # the first round's gradient

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        return state.advance_round(
            tensors={**state.tensors, **reduced.mean} if state.round else self._compute_factors(reduced.mean)
        )

    def _compute_factors(self, gradients: Tensors) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for layer in self.spec.layers:
            gradient = gradients[join_tensor_name(layer.name, "gradient")]
            U, S, Vt = compute_leading_svd(-self.init_step * torch.sign(gradient), self.r)
            parts = {"A": Vt, "B": U, "R": torch.diag(S / self.get_scaling(None))}
            for slot, value in parts.items():
                tensors[join_tensor_name(layer.name, slot)] = value.to(gradient.dtype).contiguous()
        return tensors
