"""LoRA-A2: alternating freeze, and every client trains and uploads only the rank slots that matter to it.

Koo et al., "Towards Robust and Efficient Federated Low-Rank Adaptation with Heterogeneous Clients", ACL 2025,
arXiv:2410.22815:

    probe:     one epoch on the active factor; importance of slot j of a module: ||dB[:, j]|| ||A[j, :]||
               (||B[:, j]|| ||dA[j, :]|| in rounds that train A)
    client k:  the r_k N slots of greatest importance over all N modules together; trains those from the round's start
    server:    B <- B + sum_k p_k mask_k dB_k        (A in odd rounds)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import Tensor

from fedspan.core.factors import a_factors, b_factors, lora_job, names
from fedspan.core.method import Claims, Memory, RegisteredMethod, Traffic
from fedspan.core.tensors import tensor_name
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

PROBE, TRAIN = "probe", "train"


def active(round: int) -> str:
    """B in even rounds: with B = 0 the gradient of A vanishes."""
    return "B" if round % 2 == 0 else "A"


@final
@dataclass(frozen=True, kw_only=True)
class LoRAA2(RegisteredMethod):
    """Alternate; train and send selected slots.

    Args:
        b_lr_scale: multiplier on the learning rate in rounds that train B.
    """

    claims: ClassVar[Claims] = Claims(
        paper="LoRA-A2 (ACL 2025, arXiv:2410.22815)", exact=True, heterogeneous_ranks=True, extras="frozen"
    )

    b_lr_scale: float = 5.0

    def init(self, weights: Weights) -> ServerState:
        return ServerState(tensors={**a_factors(self, self.r), **b_factors(self.spec, self.r)})

    def sync(self, state: ServerState, client: Client | None) -> Message:
        return Message(state.tensors, {"active": active(state.round)})

    def start(self, message: Message, client: Client | None, memory: Memory) -> Job:
        slot = str(message.scalars["active"])
        job = lora_job(self, message.tensors, None, train=(slot,))  # one scaling: slots, not ranks, differ
        groups = (Group(names(self.spec, slot), lr_scale=self.b_lr_scale if slot == "B" else 1.0),)
        return replace(job, trainable=groups, epochs=1, phase=PROBE, extras=False)

    def finish(self, job: Job, trained: Trained, client: Client, memory: Memory) -> tuple[Job | Message, Memory]:
        slot = job.trainable_names[0].partition("/")[2]
        if job.phase == PROBE:
            masks = self._masks(job, trained, slot, client.rank)
            return replace(job, masks=masks, epochs=None, phase=TRAIN, extras=True), memory
        reply: dict[str, Tensor] = {}
        for layer in self.spec.layers:
            name = tensor_name(layer.name, slot)
            kept = job.masks[name].any(0 if slot == "B" else 1).nonzero()[:, 0]
            change = trained.tensors[name] - job.tensors[name]
            reply[tensor_name(layer.name, "d" + slot)] = change[:, kept] if slot == "B" else change[kept]
            reply[tensor_name(layer.name, "slots")] = kept
        return Message(reply, {"active": slot}), memory

    def _masks(self, job: Job, trained: Trained, slot: str, rank: int) -> dict[str, Tensor]:
        scores: list[Tensor] = []
        for layer in self.spec.layers:
            a, b = tensor_name(layer.name, "A"), tensor_name(layer.name, "B")
            A = trained.tensors[a] - job.tensors[a] if slot == "A" else job.tensors[a]
            B = trained.tensors[b] - job.tensors[b] if slot == "B" else job.tensors[b]
            scores.append(B.norm(dim=0) * A.norm(dim=1))
        chosen = torch.cat(scores).argsort(descending=True, stable=True)[: rank * len(self.spec.layers)]
        flags = torch.zeros(self.r * len(self.spec.layers)).index_fill(0, chosen, 1.0).split(self.r)
        masks: dict[str, Tensor] = {}
        for layer, flag in zip(self.spec.layers, flags, strict=True):
            name = tensor_name(layer.name, slot)
            masks[name] = torch.ones_like(job.tensors[name]) * (flag if slot == "B" else flag[:, None])
        return masks

    def contribute(self, message: Message, client: Client) -> Contribution:
        slot = str(message.scalars["active"])
        sums: dict[str, Tensor] = {}
        for layer in self.spec.layers:
            name = tensor_name(layer.name, "d" + slot)  # a change: not under the name of the tensor that it changes
            change, kept = message.tensors[name], message.tensors[tensor_name(layer.name, "slots")]
            shape = (layer.out_features, self.r) if slot == "B" else (self.r, layer.in_features)
            sums[name] = change.new_zeros(shape).index_copy(1 if slot == "B" else 0, kept, change)
        return Contribution(sum=sums)

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        moved: dict[str, Tensor] = {}
        for name, change in reduced.mean.items():
            layer, _, slot = name.partition("/d")
            moved[tensor_name(layer, slot)] = state.tensors[tensor_name(layer, slot)] + change
        return state.next(tensors={**state.tensors, **moved})

    def traffic(self, layer: LayerSpec, rank: int, cohort: Sequence[int], round: int) -> Traffic:
        # Slots are chosen over all layers together: exact for the sum over layers only if they are alike.
        both = self.r * (layer.out_features + layer.in_features)
        size = layer.out_features if active(round) == "B" else layer.in_features
        return Traffic(down=both, up=rank * size + rank)
