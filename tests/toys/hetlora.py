"""HetLoRA: ranks of the clients' own, self-pruning, sparsity-weighted averages of zero-padded factors.

Cho et al., "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models", EMNLP 2024,
arXiv:2401.06432:

    client i:  trains A[:r_i], B[:, :r_i] on f_i + lambda ||B[:, g:]|| ||A[g:, :]||, g = floor(gamma r_i);
               if the product shrank, r_i <- g
    server:    pads with zeros to r_max;  A, B <- averages with weights ||s_i B_i A_i||_F / sum

The pruned ranks live on the server: ``sync`` cuts by them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import Tensor

from fedspan.core.factors import a_factors, b_factors, lora_job
from fedspan.core.lowrank import LowRank, inner
from fedspan.core.method import Claims, Memory, RegisteredMethod, Traffic, scaling_of
from fedspan.core.parametrization import LoRA
from fedspan.core.tensors import Tensors, tensor_name
from fedspan.core.values import (
    Client,
    Contribution,
    Job,
    LayerSpec,
    Message,
    Reduced,
    ServerState,
    Spec,
    Trained,
    Weights,
)

RANK = "rank"


@dataclass(frozen=True)
class SlotProduct:
    """``strength * sum over layers of ||B[:, first:]||_F ||A[first:, :]||_F``."""

    strength: float
    first: int
    layers: tuple[str, ...]

    def value(self, tensors: Mapping[str, Tensor]) -> Tensor:
        products = [
            torch.linalg.norm(tensors[tensor_name(layer, "B")][:, self.first :])
            * torch.linalg.norm(tensors[tensor_name(layer, "A")][self.first :])
            for layer in self.layers
        ]
        return self.strength * torch.stack(products).sum()


def cut(tensors: Tensors, spec: Spec, rank: int) -> dict[str, Tensor]:
    """The first ``rank`` slots of every pair."""
    result: dict[str, Tensor] = {}
    for layer in spec.layers:
        a, b = tensor_name(layer.name, "A"), tensor_name(layer.name, "B")
        result[a], result[b] = tensors[a][:rank].contiguous(), tensors[b][:, :rank].contiguous()
    return result


@final
@dataclass(frozen=True, kw_only=True)
class HetLoRA(RegisteredMethod):
    """Pad, weigh by sparsity, prune.

    Args:
        strength: lambda.
        gamma: fraction of the rank that survives a pruning.
    """

    claims: ClassVar[Claims] = Claims(
        paper="HetLoRA (EMNLP 2024, arXiv:2401.06432)", exact=False, heterogeneous_ranks=True, reduction="stack"
    )

    strength: float = 1e-2
    gamma: float = 0.5

    def init(self, weights: Weights) -> ServerState:
        return ServerState(tensors={**a_factors(self, self.r), **b_factors(self.spec, self.r)})

    def sync(self, state: ServerState, client: Client | None) -> Message:
        if client is None:
            return Message(state.tensors)
        return Message(cut(state.tensors, self.spec, int(state.scalars.get(f"{RANK}/{client.id}", client.rank))))

    def start(self, message: Message, client: Client | None, memory: Memory) -> Job:
        job = lora_job(self, message.tensors, None, train=("A", "B"))
        rank = message.tensors[tensor_name(self.spec.layers[0].name, "A")].shape[0]
        # client.scaling is that of the rank it began with.
        scaling = scaling_of(self.lora_alpha, rank, self.use_rslora)
        penalty = SlotProduct(self.strength, math.floor(self.gamma * rank), tuple(one.name for one in self.spec.layers))
        parametrization = {layer.name: LoRA(scaling) for layer in self.spec.layers}
        return replace(job, parametrization=parametrization, penalties=(penalty,) if penalty.first else ())

    def finish(self, job: Job, trained: Trained, client: Client, memory: Memory) -> tuple[Message, Memory]:
        tensors = {name: trained.tensors[name] for name in job.trainable_names}
        for penalty in job.penalties:
            if isinstance(penalty, SlotProduct) and penalty.value(tensors) < penalty.value(job.tensors):
                tensors = cut(tensors, self.spec, penalty.first)
        return Message(tensors), memory

    def contribute(self, message: Message, client: Client) -> Contribution:
        padded: dict[str, Tensor] = {}
        square, rank = 0.0, 0
        for layer in self.spec.layers:
            a, b = tensor_name(layer.name, "A"), tensor_name(layer.name, "B")
            A, B = message.tensors[a], message.tensors[b]
            rank = A.shape[0]
            pair = LowRank(B, A, scaling_of(self.lora_alpha, rank, self.use_rslora))
            square += float(inner(pair, pair))
            padded[a] = torch.nn.functional.pad(A, (0, 0, 0, self.r - rank))
            padded[b] = torch.nn.functional.pad(B, (0, self.r - rank))
        return Contribution(sum=padded, stack={RANK: torch.tensor(rank)}, weight=math.sqrt(square))

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        ranks = {f"{RANK}/{one.client.id}": int(one.tensors[RANK]) for one in reduced.stack}
        return state.next(tensors=reduced.mean, scalars={**state.scalars, **ranks})

    def traffic(self, layer: LayerSpec, rank: int, cohort: Sequence[int], round: int) -> Traffic:
        both = rank * (layer.out_features + layer.in_features)
        return Traffic(down=both, up=both)
