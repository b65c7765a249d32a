"""HetLoRA: clients of different ranks, zero-padded averages weighted by the size of each update, ranks that shrink.

Cho et al., "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models", EMNLP 2024,
arXiv:2401.06432.

    client i:  trains A[:r_i], B[:, :r_i] on f_i + lambda ||B[:, g:]||_F ||A[g:]||_F,  g = floor(gamma r_i);
               if that product is smaller than at the round's start:  r_i <- g, the last slots are dropped
    server:    pads with zeros;  A <- sum_i w_i A_i,  B <- sum_i w_i B_i,  w_i = ||s_i B_i A_i||_F / sum of these

Not exact: products of means, and a slot that few clients have is averaged with the others' zeros. The norms come from
r x r Gram matrices. The server stores pruned ranks, so a lost reply prunes no rank.

Deviations: the paper has no scaling; here s_i = alpha / r_i. B is averaged as (s_i / s) B_i, s being the scaling of
rank ``r``, and a client is sent (s / s_i) B, so cutting slots does not rescale the rest; a pruned client keeps its
s_i. A norm is taken over all layers together, one weight a client. A slot that no client of the cohort has stays as
it is: averaging only zeros would make A = B = 0 there, which never trains again. Where all updates are 0, and under
``weighting: examples``, the round's own weights stand in. The defaults of gamma and lambda are ours.
``federation.max_weight_ratio`` limits the norms: in every layer, one counts as that multiple of the cohort's median at
most, so that a client does not gain weight by an update that is concentrated in one layer; null: as in the paper.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedspan.core.factors import create_b_factors, create_lora_job, cut_slots, draw_a_factors, draw_initial_A
from fedspan.core.lowrank import LowRank, compute_inner_product
from fedspan.core.method import Claims, Memory, RegisteredMethod, declare_bounded, reply
from fedspan.core.penalties import SlotProduct
from fedspan.core.recent import MessageTensors
from fedspan.core.tensors import Tensors, create_generator, join_tensor_name
from fedspan.core.values import Client, Contribution, Job, Message, Reduced, ServerState, Trained, Weights


def _rank(tensors: Tensors) -> int:
    return next(len(value) for name, value in tensors.items() if name.endswith("/A"))


def _average(old_RX: Tensor, replies: Sequence[tuple[float, Tensor]]) -> Tensor:
    """Compute ``sum of share * value`` over replies padded with zero rows; rows that no reply has do not change."""
    mean = old_RX.to(torch.float64, copy=True)
    mean[: max(len(value) for _, value in replies)] = 0.0
    for share, value in replies:
        mean[: len(value)] += share * value.double()
    return mean.to(replies[0][1].dtype)


@final
@dataclass(frozen=True, kw_only=True)
class HetLoRA(RegisteredMethod):
    """Pad, weigh by size, prune.

    Args:
        gamma: Fraction of a client's rank that survives pruning; 1 never prunes.
        penalty: Strength lambda of the penalty on the slots that may be pruned.
        weighting: Weighting of the average: ``norm`` of each client's update, or the run's own weights (``examples``).
    """

    claims: ClassVar[Claims] = Claims(
        paper="Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models "
        "(EMNLP 2024, arXiv:2401.06432)",
        exact=False,
        heterogeneous_ranks=True,
        reduction="stack",
        shrinks=True,
    )

    gamma: float = declare_bounded(0.99, 0.0, 1.0)
    penalty: float = declare_bounded(1e-3, 0.0)
    weighting: Literal["norm", "examples"] = "norm"

    def declare_claims(self) -> Claims:
        return replace(self.claims, adaptive_rank=self.gamma < 1)

    def init(self, weights: Weights) -> ServerState:
        return ServerState(tensors={**draw_a_factors(self, self.r), **create_b_factors(self.spec, self.r)})

    @cached_property
    def _message_tensors(self) -> MessageTensors:
        return MessageTensors()

    def sync(self, state: ServerState, client: Client | None) -> Message:
        rank = self.r if client is None else int(state.scalars.get(f"rank/{client.id}", client.rank))
        share = self.get_scaling(None) / self.get_scaling(client)

        def cut() -> Tensors:
            slots = cut_slots(self._widen(state.tensors, rank), rank)
            return {name: value * share if name.endswith("/B") else value for name, value in slots.items()}

        return Message(self._message_tensors.get_or_compute(state.round, state.tensors, (rank, share), cut))

    def _widen(self, tensors: Tensors, rank: int) -> dict[str, Tensor]:
        """Widen to a rank with untrained slots, B = 0 and A drawn by slot."""
        current_rank = _rank(tensors)
        if current_rank >= rank:
            return dict(tensors)
        wide: dict[str, Tensor] = {}
        for layer in self.spec.layers:
            a, b = join_tensor_name(layer.name, "A"), join_tensor_name(layer.name, "B")
            rows = [
                draw_initial_A(layer, 1, create_generator(self.seed, "A", layer.name, "slot", k))
                for k in range(current_rank, rank)
            ]
            wide[a] = torch.cat([tensors[a], torch.cat(rows).to(tensors[a])])
            wide[b] = pad(tensors[b], (0, rank - current_rank))
        return wide

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        rank = _rank(message.tensors)
        pruned = 0 if client is None else client.rank - rank  # moments of more slots do not fit any longer
        job = create_lora_job(self, message.tensors, client, train=("A", "B"), generation=pruned)
        first = math.floor(self.gamma * rank)
        tail = SlotProduct(self.penalty, first, tuple(layer.name for layer in self.spec.layers))
        return replace(job, penalties=(tail,)) if 0 < first < rank else job

    def finish(self, job: Job, trained: Trained, client: Client, memory: Memory, round: int) -> tuple[Message, Memory]:
        message = reply(job, trained)
        for tail in job.penalties:
            assert isinstance(tail, SlotProduct)
            measure = replace(tail, strength=1.0)
            if measure.compute_value(message.tensors) < measure.compute_value(job.tensors):
                message = Message(cut_slots(message.tensors, tail.first))
        return message, memory

    def contribute(self, message: Message, client: Client) -> Contribution:
        rank = _rank(message.tensors)
        for layer in self.spec.layers:
            a, b = (message.tensors[join_tensor_name(layer.name, slot)] for slot in ("A", "B"))
            if (
                not 0 < rank <= client.rank
                or a.shape != (rank, layer.in_features)
                or b.shape != (layer.out_features, rank)
            ):
                raise ValueError(f"factors {list(b.shape)} and {list(a.shape)} of a client of rank {client.rank}")
        return Contribution(stack=message.tensors)

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        sizes = self._compute_norms(reduced)
        if self.weighting == "examples" or not sum(sizes) > 0:
            sizes = [item.weight for item in reduced.stack]
        total, scaling = sum(sizes), self.get_scaling(None)
        ranks = {item.client.id: _rank(item.tensors) for item in reduced.stack}
        tensors = self._widen(state.tensors, max(ranks.values()))
        for layer in self.spec.layers:
            a, b = join_tensor_name(layer.name, "A"), join_tensor_name(layer.name, "B")
            pairs = list(zip(reduced.stack, sizes, strict=True))
            rows = [(size / total, item.tensors[a]) for item, size in pairs]
            columns = [
                (size / total * self.get_scaling(item.client) / scaling, item.tensors[b].T) for item, size in pairs
            ]
            tensors[a] = _average(tensors[a], rows)
            tensors[b] = _average(tensors[b].T, columns).T.contiguous()
        pruned = {
            f"rank/{item.client.id}": ranks[item.client.id]
            for item in reduced.stack
            if ranks[item.client.id] < item.client.rank
        }
        return state.advance_round(tensors=tensors, scalars={**state.scalars, **pruned})

    def _compute_norms(self, reduced: Reduced) -> list[float]:
        """Compute ``||s_i B_i A_i||_F`` over all layers, by client; in each layer, the cohort's median is a limit."""
        squares = [0.0] * len(reduced.stack)
        for layer in self.spec.layers:
            a, b = join_tensor_name(layer.name, "A"), join_tensor_name(layer.name, "B")
            pairs = [LowRank(item.tensors[b], item.tensors[a], self.get_scaling(item.client)) for item in reduced.stack]
            own = [max(float(compute_inner_product(pair, pair)), 0.0) for pair in pairs]
            if reduced.max_weight_ratio is not None:
                limit = reduced.max_weight_ratio**2 * statistics.median_low(own)
                own = [min(square, limit) for square in own]
            squares = [sum(both) for both in zip(squares, own, strict=True)]
        return [math.sqrt(square) for square in squares]
