"""LoRA-A2: factors take turns, and a client trains and sends only the slots that matter most to its own data.

Koo et al., "Towards Robust and Efficient Federated Low-Rank Adaptation with Heterogeneous Clients", ACL 2025,
arXiv:2410.22815. B in even rounds (counted from 0), A in odd ones; N layers with r slots each; client k may have r_k N:

    probe:     one epoch on the active factor, discarded;  importance of slot j of a layer:
               ||dB[:, j]|| ||A[j]||   (||B[:, j]|| ||dA[j]|| where A is active)
    client k:  trains the r_k N slots of greatest importance over all layers together, and sends their change
    server:    B <- B + sum_k p_k dB_k      (A <- A + sum_k p_k dA_k), a slot that k did not send counts as dB_k = 0

Exact: the other factor is the same for all clients. A client's rank r_k is its budget; the model has rank ``r``, and
one scaling for all. A budget above r is r.

Deviations: training starts again from the round's factors after the probe (the text can be read either way); the head
does not train in the probe, in which norms are in training mode as usual. The paper freezes the head; here it follows
``model.extras`` (default ``average``), as for FFA-LoRA. B's learning rate is ``b_lr_scale`` times A's: the paper takes
two rates, as LoRA+ does; 5 is our default.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import Tensor

from fedspan.core.factors import (
    create_b_factors,
    create_lora_job,
    draw_a_factors,
    get_alternating_factor,
    list_alternating_factors,
    list_tensor_names,
)
from fedspan.core.method import Claims, Memory, RegisteredMethod
from fedspan.core.tensors import Tensors, join_tensor_name, select
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

_SLOT_AXIS = {"A": 0, "B": 1}


def _require_slots(slots: Tensor, change: Tensor, shape: tuple[int, int], axis: int) -> None:
    """Check that a reply's change is of distinct slots that exist."""
    indices: list[int] = slots.flatten().tolist()
    is_valid = change.shape == (*shape[:axis], len(indices), *shape[axis + 1 :])
    if (
        slots.ndim != 1
        or not is_valid
        or len(set(indices)) != len(indices)
        or not all(0 <= index < shape[axis] for index in indices)
    ):
        raise ValueError(
            f"a change {list(change.shape)} of slots {indices[:8]}, not of distinct ones below {shape[axis]}"
        )


@final
@dataclass(frozen=True, kw_only=True)
class LoRAA2(RegisteredMethod):
    """Alternate; train and send selected slots.

    Args:
        b_lr_scale: Multiplier on the learning rate in rounds that train B.
    """

    claims: ClassVar[Claims] = Claims(
        paper="Towards Robust and Efficient Federated Low-Rank Adaptation with Heterogeneous Clients "
        "(ACL 2025, arXiv:2410.22815)",
        exact=True,
        sends="other",
        heterogeneous_ranks=True,
        shrinks=True,
        budgets=True,
    )

    b_lr_scale: float = 5.0

    def init(self, weights: Weights) -> ServerState:
        return ServerState(tensors=self._draw_initial())

    def _draw_initial(self) -> dict[str, Tensor]:
        return {**draw_a_factors(self, self.r), **create_b_factors(self.spec, self.r)}

    def sync(self, state: ServerState, client: Client | None) -> Message:
        slots = list_alternating_factors(state.round, None if client is None else client.last_round)
        return Message(select(state.tensors, list_tensor_names(self.spec, *slots)))

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        active = get_alternating_factor(round)
        job = create_lora_job(self, {**(memory or self._draw_initial()), **message.tensors}, None, train=(active,))
        groups = (Group(job.trainable_names, lr_scale=self.b_lr_scale if active == "B" else 1.0),)
        scalars = {"active": active}
        return replace(job, trainable=groups, epochs=1, phase="probe", extras=False, scalars=scalars)

    def finish(
        self, job: Job, trained: Trained, client: Client, memory: Memory, round: int
    ) -> tuple[Job | Message, Memory]:
        active = str(job.scalars["active"])
        if job.phase == "probe":
            masks = self._build_masks(job.tensors, trained.tensors, active, client.rank)
            return replace(job, masks=masks, epochs=None, phase="train", extras=True), memory
        axis, tensors = _SLOT_AXIS[active], dict[str, Tensor]()
        for name, mask in job.masks.items():
            layer = name.partition("/")[0]
            slots = mask.any(1 - axis).nonzero()[:, 0]
            tensors[join_tensor_name(layer, "slots")] = slots.to(torch.int32)
            tensors[join_tensor_name(layer, "d" + active)] = (trained.tensors[name] - job.tensors[name]).index_select(
                axis, slots
            )
        return Message(tensors, {"active": active}), select(job.tensors, list_tensor_names(self.spec, "A", "B"))

    def _build_masks(self, before: Tensors, probed: Tensors, active: str, rank: int) -> dict[str, Tensor]:
        """Build masks with 1 in the most important slots, ``rank`` per layer on average; ties go to the first."""
        importance: list[Tensor] = []
        for layer in self.spec.layers:
            masks_before = {slot: before[join_tensor_name(layer.name, slot)] for slot in ("A", "B")}
            masks_before[active] = probed[join_tensor_name(layer.name, active)] - masks_before[active]
            importance.append(masks_before["B"].norm(dim=0) * masks_before["A"].norm(dim=1))
        selected = torch.cat(importance).argsort(descending=True, stable=True)[: rank * len(importance)]
        flags = torch.zeros(self.r * len(importance)).index_fill(0, selected, 1.0).split(self.r)
        masks: dict[str, Tensor] = {}
        for layer, flag in zip(self.spec.layers, flags, strict=True):
            name = join_tensor_name(layer.name, active)
            masks[name] = (flag if active == "B" else flag[:, None]).expand_as(before[name])
        return masks

    def list_added_epochs(self) -> tuple[int, ...]:
        return (1,)  # the probe

    def contribute(self, message: Message, client: Client) -> Contribution:
        active = str(message.scalars["active"])
        axis, sums = _SLOT_AXIS[active], dict[str, Tensor]()
        for layer in self.spec.layers:
            name = join_tensor_name(
                layer.name, "d" + active
            )  # a change: its name differs from that of the changed tensor
            change, slots = message.tensors[name], message.tensors[join_tensor_name(layer.name, "slots")]
            shape = (layer.out_features, self.r) if active == "B" else (self.r, layer.in_features)
            _require_slots(slots, change, shape, axis)
            sums[name] = change.new_zeros(shape).index_copy(axis, slots.long(), change)
        return Contribution(sum=sums)

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        active = get_alternating_factor(state.round)
        updated = {
            name: state.tensors[name] + reduced.mean[join_tensor_name(name.partition("/")[0], "d" + active)]
            for name in list_tensor_names(self.spec, active)
        }
        return state.advance_round(tensors={**state.tensors, **updated})

    def estimate_messages(self, layer: LayerSpec, rank: int, round: int) -> tuple[Message, Message]:
        # Slots are selected over all layers together: the reply is that of the mean layer, exact if all are selected.
        def build_factor(slot: str, slots: int) -> Tensor:
            return torch.zeros((slots, layer.in_features) if slot == "A" else (layer.out_features, slots))

        received, active, budget = get_alternating_factor(round - 1), get_alternating_factor(round), min(rank, self.r)
        down = {join_tensor_name(layer.name, received): build_factor(received, self.r)} if round else {}
        up = {
            join_tensor_name(layer.name, "slots"): torch.zeros(budget, dtype=torch.int32),
            join_tensor_name(layer.name, "d" + active): build_factor(active, budget),
        }
        return Message(down), Message(up)
