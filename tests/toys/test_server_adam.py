"""FedAdam around FedLoRU against a hand-written server."""

from __future__ import annotations

import pytest
import torch

from fedspan.core.tensors import tensor_name
from fedspan.errors import FedspanError
from fedspan.methods.fedloru import FedLoRU
from fedspan.methods.flora import FLoRA
from fedspan.methods.florg import FLoRG
from fedspan.methods.rolora import RoLoRA
from fedspan.wrappers.extras import WithExtras

from .lora_a2 import LoRAA2
from .oracle import copied, descend
from .problem import HEAD, LAYERS, Problem
from .rounds import Double, Federation, close, sgd
from .server_adam import FIRST, ServerAdam

LR, SCALING, STEPS, TAU = 0.3, 2.0, 2, 2
SERVER_LR, BETAS, ADAPTIVITY = 0.05, (0.8, 0.9), 1e-2


class _Server:
    """FedAdam of one tensor, as the paper writes it."""

    def __init__(self) -> None:
        self.m = self.v = torch.zeros(())

    def step(self, x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        delta = mean - x
        self.m = BETAS[0] * self.m + (1 - BETAS[0]) * delta
        self.v = BETAS[1] * self.v + (1 - BETAS[1]) * delta * delta
        return x + SERVER_LR * self.m / (torch.sqrt(self.v) + ADAPTIVITY)


def test_fedloru_under_fedadam_matches_the_oracle_and_forgets_at_accumulations() -> None:
    problem = Problem()
    inner = FedLoRU(spec=problem.adapted().spec, seed=4, r=2, lora_alpha=4.0, tau=TAU)
    wrapped = ServerAdam(inner=WithExtras(inner=inner, policy="average"), lr=SERVER_LR, betas=BETAS, tau=ADAPTIVITY)
    federation = Federation(Double(inner=wrapped), problem, sgd(LR, steps=STEPS))
    W, head = problem.dense(*LAYERS), problem.dense(*HEAD)

    def fresh(generation: int) -> dict:
        tensors = inner._fresh(generation)
        return {one: {s: tensors[tensor_name(one, s)].double() for s in "AB"} for one in LAYERS}

    server = fresh(0)
    adams = {key: _Server() for key in [(one, s) for one in LAYERS for s in "AB"] + list(HEAD)}
    for number, members in enumerate([(0, 1, 2, 3), (0, 2), (1, 2, 3), (0, 1, 2, 3), (1, 3)]):
        cohort = [problem.client_ids[member] for member in members]
        federation.round(cohort)
        shares = problem.shares(cohort)
        mean = {one: {s: torch.zeros_like(server[one][s]) for s in "AB"} for one in LAYERS}
        head_mean = {name: torch.zeros_like(head[name]) for name in HEAD}
        for id in cohort:
            mine, own_head = copied(server), dict(head)
            descend(problem, id, W, own_head, mine, SCALING, LR, STEPS)
            for one in LAYERS:
                for s in "AB":
                    mean[one][s] += shares[id] * mine[one][s]
            for name in HEAD:
                head_mean[name] += shares[id] * own_head[name]
        for one in LAYERS:
            for s in "AB":
                server[one][s] = adams[one, s].step(server[one][s], mean[one][s])
        for name in HEAD:
            head[name] = adams[name].step(head[name], head_mean[name])
        if (number + 1) % TAU == 0:
            for one in LAYERS:
                W[one] = W[one] + SCALING * server[one]["B"] @ server[one]["A"]
                for s in "AB":
                    adams[one, s] = _Server()
            server = fresh((number + 1) // TAU)
            kept = {name for name in federation.state.memory if name.startswith(FIRST)}
            assert kept == {FIRST + f"extras/{name}" for name in HEAD}  # the head was not re-initialised
        for one in LAYERS:
            for s in "AB":
                assert close(federation.state.tensors[tensor_name(one, s)].double(), server[one][s])
            assert close(federation.weight(one), W[one] + SCALING * server[one]["B"] @ server[one]["A"])
        for name in HEAD:
            assert close(federation.state.tensors[f"extras/{name}"], head[name])


def test_only_what_travelled_gathers_moments() -> None:
    problem = Problem(clients=2)
    wrapped = ServerAdam(inner=RoLoRA(spec=problem.adapted().spec, r=2))
    federation = Federation(Double(inner=wrapped), problem, sgd(LR))
    federation.round()
    assert {name for name in federation.state.memory if name.startswith(FIRST)} == {
        FIRST + tensor_name(one, "B") for one in LAYERS
    }
    frozen = {one: federation.state.tensors[tensor_name(one, "B")] for one in LAYERS}
    federation.round()
    for one in LAYERS:  # the frozen factor does not move by its stale moments
        assert torch.equal(federation.state.tensors[tensor_name(one, "B")], frozen[one])


def test_refused_where_a_pseudo_gradient_has_no_meaning() -> None:
    problem = Problem(clients=2)
    spec = problem.adapted().spec
    for method in (FLoRA(spec=spec), FLoRG(spec=spec)):
        with pytest.raises(FedspanError, match="server_optimizer"):
            ServerAdam(inner=method)
    federation = Federation(Double(inner=ServerAdam(inner=LoRAA2(spec=spec, r=2))), problem, sgd(LR))
    with pytest.raises(FedspanError, match="fc1/dB is no tensor that was sent"):
        federation.round()
