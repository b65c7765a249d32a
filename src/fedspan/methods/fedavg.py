"""FedAvg: average the target layers' whole weights.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
arXiv:1602.05629.

    client i:  trains W_i from the global W
    server:    W <- sum_i p_i W_i

Exact by definition; the reference for transmitted bytes.

Deviations: only the target modules (and the extras) train, as for the low-rank methods that it is compared with; target
every layer for the original. W is also sent in round 0: clients need not hold the same copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from fedspan.core.factors import list_tensor_names
from fedspan.core.method import Claims, Memory, RegisteredMethod
from fedspan.core.parametrization import Dense
from fedspan.core.tensors import join_tensor_name
from fedspan.core.values import Client, Group, Job, Message, ServerState, Weights


@final
@dataclass(frozen=True, kw_only=True)
class FedAvg(RegisteredMethod):
    """Average whole weights."""

    claims: ClassVar[Claims] = Claims(
        paper="Communication-Efficient Learning of Deep Networks from Decentralized Data "
        "(AISTATS 2017, arXiv:1602.05629)",
        exact=True,
        adapter=False,
    )

    def init(self, weights: Weights) -> ServerState:
        return ServerState(
            tensors={join_tensor_name(layer.name, "W"): weights.get_weight(layer.name) for layer in self.spec.layers}
        )

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        return Job(
            parametrization={layer.name: Dense() for layer in self.spec.layers},
            tensors=message.tensors,
            trainable=(Group(list_tensor_names(self.spec, "W")),),
        )
