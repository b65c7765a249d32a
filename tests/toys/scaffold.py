"""SCAFFOLD: control variates correct the drift of local SGD.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020, arXiv:1910.06378,
algorithm 1 with option II and server step size 1:

    client i:  y_i <- y_i - lr (g_i(y_i) - c_i + c), K times from x;  c_i+ = c_i - c + (x - y_i) / (K lr)
    server:    x <- x + mean_S (y_i - x);   c <- c + |S| / N mean_S (c_i+ - c_i)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch

from fedspan.core.factors import names
from fedspan.core.method import Claims, Memory, RegisteredMethod, Traffic
from fedspan.core.parametrization import Dense
from fedspan.core.tensors import Tensors, add, map_tensors, scale, select, subtract, tensor_name
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


def renamed(tensors: Tensors, slot: str) -> Tensors:
    """The same tensors under another slot."""
    return {tensor_name(name.partition("/")[0], slot): value for name, value in tensors.items()}


@final
@dataclass(frozen=True, kw_only=True)
class Scaffold(RegisteredMethod):
    """Average whole weights under control variates.

    Args:
        clients: N, all clients of the federation (no argument of the six functions says it).
    """

    claims: ClassVar[Claims] = Claims(paper="SCAFFOLD (ICML 2020, arXiv:1910.06378)", exact=True, adapter=False)

    clients: int = 1

    def init(self, weights: Weights) -> ServerState:
        tensors = {tensor_name(layer.name, "W"): weights.weight(layer.name) for layer in self.spec.layers}
        return ServerState(tensors=tensors, memory=renamed(map_tensors(torch.zeros_like, tensors), "c"))

    def sync(self, state: ServerState, client: Client | None) -> Message:
        return Message({**state.tensors, **state.memory})

    def start(self, message: Message, client: Client | None, memory: Memory) -> Job:
        x = select(message.tensors, names(self.spec, "W"))
        c = renamed(select(message.tensors, names(self.spec, "c")), "W")
        own = renamed(memory, "W") or map_tensors(torch.zeros_like, c)
        return Job(
            parametrization={layer.name: Dense() for layer in self.spec.layers},
            tensors=x,
            trainable=(Group(tuple(x)),),
            gradient_offset=subtract(c, own),
            optimizer={"name": "sgd", "momentum": 0.0, "weight_decay": 0.0},
        )

    def finish(self, job: Job, trained: Trained, client: Client, memory: Memory) -> tuple[Message, Memory]:
        y = select(trained.tensors, job.trainable_names)
        drift = scale(subtract(job.tensors, y), 1.0 / trained.lr_sum)
        after = renamed(subtract(drift, job.gradient_offset), "c")
        change = subtract(after, memory) if memory else after
        return Message({**y, **change}), after

    def contribute(self, message: Message, client: Client) -> Contribution:
        return Contribution(sum=message.tensors)

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        c = add(state.memory, scale(select(reduced.mean, state.memory), reduced.count / self.clients))
        return state.next(tensors=select(reduced.mean, state.tensors), memory=c)

    def traffic(self, layer: LayerSpec, rank: int, clients: int, round: int) -> Traffic:
        both = 2 * layer.out_features * layer.in_features
        return Traffic(down=both, up=both)
