"""FedHM: the server holds dense weights; every client trains a low-rank factorisation of the size that it can carry.

Yao et al., "FedHM: Efficient Federated Learning for Heterogeneous Models via Low-rank Factorization",
arXiv:2111.14655:

    server:    W = U S V^T;  client i gets U_r S_r^(1/2), S_r^(1/2) V_r^T with r = r_i
    client i:  trains both factors; there is no frozen base
    server:    W <- sum_i p_i U_i V_i

The decomposition is made once a round, in ``update``, and kept in the server's memory: ``sync`` only cuts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from fedspan.core.factors import names, reply
from fedspan.core.lowrank import fix_signs
from fedspan.core.method import Claims, Memory, RegisteredMethod, Traffic
from fedspan.core.parametrization import Dense, Factorised
from fedspan.core.tensors import slots_of, tensor_name
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


def balanced_factors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``U S^(1/2)`` and ``S^(1/2) V^T`` of every ``layer/W``, all singular values, descending."""
    factors: dict[str, Tensor] = {}
    for name, weight in tensors.items():
        layer = name.removesuffix("/W")
        U, S, Vt = torch.linalg.svd(weight.double(), full_matrices=False)
        U, Vt = fix_signs(U, Vt)
        factors[tensor_name(layer, "U")] = (U * S.sqrt()).to(weight.dtype)
        factors[tensor_name(layer, "V")] = (S.sqrt()[:, None] * Vt).to(weight.dtype)
    return factors


@final
@dataclass(frozen=True, kw_only=True)
class FedHM(RegisteredMethod):
    """Train factors, average products."""

    claims: ClassVar[Claims] = Claims(
        paper="FedHM (arXiv:2111.14655)",
        exact=True,
        heterogeneous_ranks=True,
        reduction="stack",
        adapter=False,
        reinitialises=True,
    )

    def init(self, weights: Weights) -> ServerState:
        tensors = {tensor_name(layer.name, "W"): weights.weight(layer.name) for layer in self.spec.layers}
        return ServerState(tensors=tensors, memory=balanced_factors(tensors))

    def sync(self, state: ServerState, client: Client | None) -> Message:
        if client is None:
            return Message(state.tensors)
        cut: dict[str, Tensor] = {}
        for layer in self.spec.layers:
            U, V = (state.memory[tensor_name(layer.name, slot)] for slot in "UV")
            cut[tensor_name(layer.name, "U")] = U[:, : client.rank].contiguous()
            cut[tensor_name(layer.name, "V")] = V[: client.rank].contiguous()
        return Message(cut)

    def start(self, message: Message, client: Client | None, memory: Memory) -> Job:
        whole = "W" in slots_of(message.tensors, self.spec.layers[0].name)
        return Job(
            parametrization={layer.name: Dense() if whole else Factorised() for layer in self.spec.layers},
            tensors=message.tensors,
            trainable=(Group(names(self.spec, *("W" if whole else "UV"))),),
        )

    def finish(self, job: Job, trained: Trained, client: Client, memory: Memory) -> tuple[Message, Memory]:
        return reply(job, trained), memory

    def contribute(self, message: Message, client: Client) -> Contribution:
        return Contribution(stack=message.tensors)

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        tensors: dict[str, Tensor] = {}
        for layer in self.spec.layers:
            u, v = tensor_name(layer.name, "U"), tensor_name(layer.name, "V")
            products = [one.weight * one.tensors[u] @ one.tensors[v] for one in reduced.stack]
            tensors[tensor_name(layer.name, "W")] = torch.stack(products).sum(0)
        return state.next(tensors=tensors, memory=balanced_factors(tensors), generation=state.generation + 1)

    def traffic(self, layer: LayerSpec, rank: int, cohort: Sequence[int], round: int) -> Traffic:
        both = min(rank, *layer.shape) * (layer.out_features + layer.in_features)
        return Traffic(down=both, up=both)
