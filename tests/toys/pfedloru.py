"""pFedLoRU: FedLoRU's shared pair, and a personal pair that never leaves the client.

Park and Klabjan, arXiv:2409.12371, appendix C.2, algorithm 2:

    client k:  L_k, U_k <- argmin f_k(W_t + a_g B A + a_p L_k U_k)   for E_per epochs, A and B fixed      (82)
               A_k, B_k <- argmin f_k(W_t + a_g B A + a_p L_k U_k)   for E_global epochs, L and U fixed   (83)
    server:    as FedLoRU: A, B averaged; W <- W + a_g B A and A, B new every tau rounds

Everything on the server is FedLoRU's own; only the client has a second pair and a second phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import Tensor

from fedspan.core.factors import initial_A, names, reply
from fedspan.core.method import Claims, Memory, RegisteredMethod, Traffic
from fedspan.core.parametrization import PairSum
from fedspan.core.tensors import generator, select, tensor_name
from fedspan.core.values import (
    Client,
    Contribution,
    Group,
    Job,
    LayerSpec,
    Message,
    Reduced,
    ServerState,
    Spec,
    Trained,
    Weights,
)
from fedspan.methods.fedloru import FedLoRU

PERSONAL, GLOBAL = "personal", "global"


def personal_pair(spec: Spec, rank: int, seed: int, client: Client | None) -> dict[str, Tensor]:
    """L = 0 and U drawn by (seed, "U", layer, client): the product starts at 0, as LoRA's does."""
    tensors: dict[str, Tensor] = {}
    for layer in spec.layers:
        rng = generator(seed, "U", layer.name, "" if client is None else client.id)
        tensors[tensor_name(layer.name, "L")] = torch.zeros(layer.out_features, rank)
        tensors[tensor_name(layer.name, "U")] = initial_A(layer, rank, rng)
    return tensors


@final
@dataclass(frozen=True, kw_only=True)
class PFedLoRU(RegisteredMethod):
    """FedLoRU with a personal pair.

    Args:
        tau: rounds between accumulations.
        personal_r: rank of L U.
        personal_scaling: a_p.
        personal_epochs: E_per.
        global_epochs: E_global.
    """

    claims: ClassVar[Claims] = Claims(paper="pFedLoRU (arXiv:2409.12371)", exact=False, personal=True)

    tau: int = 2
    personal_r: int = 1
    personal_scaling: float = 1.0
    personal_epochs: int = 2
    global_epochs: int = 3

    @property
    def shared(self) -> FedLoRU:
        """The method of the shared pair."""
        return FedLoRU(
            spec=self.spec,
            seed=self.seed,
            r=self.r,
            lora_alpha=self.lora_alpha,
            use_rslora=self.use_rslora,
            tau=self.tau,
        )

    def init(self, weights: Weights) -> ServerState:
        return self.shared.init(weights)

    def sync(self, state: ServerState, client: Client | None) -> Message:
        return self.shared.sync(state, client)

    def start(self, message: Message, client: Client | None, memory: Memory) -> Job:
        job = self.shared.start(message, client, {})
        own = memory or personal_pair(self.spec, self.personal_r, self.seed, client)
        parametrization = PairSum(self.scaling(client), self.personal_scaling)
        return replace(
            job,
            parametrization={layer.name: parametrization for layer in self.spec.layers},
            tensors={**job.tensors, **own},
            trainable=(Group(names(self.spec, "L", "U")),),
            epochs=self.personal_epochs,
            phase=PERSONAL,
        )

    def finish(self, job: Job, trained: Trained, client: Client, memory: Memory) -> tuple[Job | Message, Memory]:
        if job.phase == PERSONAL:
            groups = (Group(names(self.spec, "A", "B")),)
            epochs = self.global_epochs
            return replace(job, tensors=trained.tensors, trainable=groups, epochs=epochs, phase=GLOBAL), memory
        return reply(job, trained), select(trained.tensors, names(self.spec, "L", "U"))

    def contribute(self, message: Message, client: Client) -> Contribution:
        return self.shared.contribute(message, client)

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        return self.shared.update(state, reduced)

    def traffic(self, layer: LayerSpec, rank: int, cohort: Sequence[int], round: int) -> Traffic:
        return self.shared.traffic(layer, rank, cohort, round)
