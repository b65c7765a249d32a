"""FLoRG: one trainable factor under fixed orthonormal bases; the server averages Gram matrices and aligns.

"FLoRG", arXiv:2602.17095, appendix A.2, algorithm 1:

    client n:  A_n <- A - lr grad_A F_n(W0 + L A^T A R)           L^T L = I, R R^T = I, fixed
    server:    Q = sum_n p_n A_n^T A_n = P^T Lambda P;  A~ = Lambda^(1/2) P;  S = U V^T of A A~^T;  A <- S A~

L and R follow from the seed and never travel. Q is not formed: A~ comes from the SVD of the stacked sqrt(p_n) A_n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from fedspan.core.alignment import procrustes
from fedspan.core.factors import names, reply
from fedspan.core.method import Claims, Memory, RegisteredMethod, Traffic
from fedspan.core.parametrization import Gram
from fedspan.core.projectors import random_projector
from fedspan.core.tensors import generator, tensor_name
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


@final
@dataclass(frozen=True, kw_only=True)
class FLoRG(RegisteredMethod):
    """Average Gram matrices.

    Args:
        init_std: of A's entries at the start (A = 0 is a stationary point).
    """

    claims: ClassVar[Claims] = Claims(paper="FLoRG (arXiv:2602.17095)", exact=False, reduction="stack")

    init_std: float = 0.3

    def init(self, weights: Weights) -> ServerState:
        tensors: dict[str, Tensor] = {}
        for layer in self.spec.layers:
            rng = generator(self.seed, "A", layer.name)
            tensors[tensor_name(layer.name, "A")] = self.init_std * torch.randn(self.r, min(layer.shape), generator=rng)
        return ServerState(tensors=tensors)

    def bases(self, layer: LayerSpec) -> tuple[Tensor, Tensor]:
        """L (O, K) and R (K, I), with orthonormal columns and rows."""
        k = min(layer.shape)
        L = random_projector(layer.shape, k, "left", generator(self.seed, "L", layer.name))
        return L, random_projector(layer.shape, k, "right", generator(self.seed, "R", layer.name))

    def sync(self, state: ServerState, client: Client | None) -> Message:
        return Message(state.tensors)

    def start(self, message: Message, client: Client | None, memory: Memory) -> Job:
        tensors = dict(message.tensors)
        for layer in self.spec.layers:
            tensors[tensor_name(layer.name, "L")], tensors[tensor_name(layer.name, "R")] = self.bases(layer)
        return Job(
            parametrization={layer.name: Gram() for layer in self.spec.layers},
            tensors=tensors,
            trainable=(Group(names(self.spec, "A")),),
        )

    def finish(self, job: Job, trained: Trained, client: Client, memory: Memory) -> tuple[Message, Memory]:
        return reply(job, trained), memory

    def contribute(self, message: Message, client: Client) -> Contribution:
        return Contribution(stack=message.tensors)

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        tensors: dict[str, Tensor] = {}
        for name, before in state.tensors.items():
            stacked = torch.cat([math.sqrt(one.weight) * one.tensors[name].double() for one in reduced.stack])
            _, S, Vt = torch.linalg.svd(stacked, full_matrices=False)
            aligned = procrustes(S[:, None] * Vt, before.double()) @ (S[:, None] * Vt)
            tensors[name] = aligned.to(reduced.stack[0].tensors[name].dtype)
        return state.next(tensors=tensors, generation=state.generation + 1)

    def traffic(self, layer: LayerSpec, rank: int, cohort: Sequence[int], round: int) -> Traffic:
        return Traffic(down=rank * min(layer.shape), up=rank * min(layer.shape))
