"""mFedLoRU: FedLoRU in which a client of lower rank trains low-rank updates of the factors themselves.

Park and Klabjan, "Communication-Efficient Federated Low-Rank Update Algorithm and its Connection to Implicit
Regularization", arXiv:2409.12371, appendix C.3, algorithm 3.

    client k with r_k < r:  trains B_d (O, r_k), B_u (r_k, r), A_d (r, r_k), A_u (r_k, I), from products of zero, in
                            W + s (B + n B_d B_u) (A + n A_d A_u),  A and B fixed                     (eq. 84)
    client k with r_k = r:  trains A, B, as in FedLoRU
    server:    A_k = A + n A_d A_u,  B_k = B + n B_d B_u, then as FedLoRU                             (eq. 85)

Every client holds the same A and B of rank r and the one scaling s = lora_alpha / r; only nested factors are sent to
the server.

Deviations: the paper's letters are swapped (its A is our B). Its two nested ranks are one, ``client.rank``. The
multiplier n is ``nested_scaling``, 1/2 for every client: the paper's experiments have alpha_A / r_A = alpha_B / r_B =
1/2, which is the multiplier by the convention of its published code (alpha / r). Ranks above r count as r. Of a product
of zero the left factor is 0 and the right one drawn from (seed, layer, round, client): the paper asks only that the
product be 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import Tensor

from fedspan.core.factors import draw_kaiming, list_tensor_names
from fedspan.core.method import Claims, Memory
from fedspan.core.parametrization import LoRA, Nested
from fedspan.core.tensors import create_generator, join_tensor_name, select_slots
from fedspan.core.values import Client, Group, Job, Message, Reduced, ServerState, StackItem
from fedspan.methods.fedloru import FedLoRU


@final
@dataclass(frozen=True, kw_only=True)
class MFedLoRU(FedLoRU):
    """FedLoRU with nested low-rank updates where a client's rank is below ``r``.

    Args:
        nested_scaling: Multiplier n of a nested product (the paper's alpha_A / r_A = alpha_B / r_B).
    """

    claims: ClassVar[Claims] = replace(FedLoRU.claims, heterogeneous_ranks=True, reduction="stack")

    nested_scaling: float = 0.5

    def _get_parametrization(self, client: Client | None) -> LoRA | Nested:
        if client is None or client.rank >= self.r:
            return LoRA(self.get_scaling(None))
        return Nested(self.get_scaling(None), self.nested_scaling)

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        job = super().start(message, client, memory, round)
        parametrization = self._get_parametrization(client)
        job = replace(job, parametrization={layer.name: parametrization for layer in self.spec.layers})
        if client is None or isinstance(parametrization, LoRA):
            return job
        tensors = dict(job.tensors)
        for layer in self.spec.layers:
            for slot, rows, columns in (("A", self.r, layer.in_features), ("B", layer.out_features, self.r)):
                rng = create_generator(self.seed, f"{slot}_u", layer.name, round, client.id)
                tensors[join_tensor_name(layer.name, f"{slot}_d")] = torch.zeros(rows, client.rank)
                tensors[join_tensor_name(layer.name, f"{slot}_u")] = draw_kaiming(client.rank, columns, rng)
        nested = Group(list_tensor_names(self.spec, "A_d", "A_u", "B_d", "B_u"))
        # Nested factors are new every round, so moments of an earlier round are invalid.
        return replace(job, tensors=tensors, trainable=(nested,), generation=round)

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        rebuilt = [(item.weight, self._rebuild(state, item)) for item in reduced.stack]
        mean = {
            name: torch.stack([share * factors[name].double() for share, factors in rebuilt]).sum(0).to(value.dtype)
            for name, value in rebuilt[0][1].items()
        }
        return super().update(state, replace(reduced, mean=mean))

    def _rebuild(self, state: ServerState, item: StackItem) -> dict[str, Tensor]:
        parametrization = self._get_parametrization(item.client)
        if isinstance(parametrization, LoRA):
            return dict(item.tensors)
        return {
            join_tensor_name(layer.name, slot): parametrization.compute_outer(
                {**select_slots(state.tensors, layer.name), **select_slots(item.tensors, layer.name)}, slot
            )
            for layer in self.spec.layers
            for slot in ("A", "B")
        }
