"""SCAFFOLD against the textbook's algorithm on dense weights."""

from __future__ import annotations

import torch

from fedspan.methods.fedavg import FedAvg

from .problem import LAYERS, Problem
from .rounds import Federation, close, sgd, with_extras
from .scaffold import Scaffold

LR, STEPS = 0.3, 3


def _federation(problem: Problem) -> Federation:
    method = Scaffold(spec=problem.adapted().spec, clients=len(problem.client_ids))
    return Federation(with_extras(method, "frozen"), problem, sgd(LR, steps=STEPS), uniform=True)


def test_matches_the_textbook_update() -> None:
    problem = Problem()
    federation = _federation(problem)
    x, N = problem.dense(), len(problem.client_ids)
    c = {layer: torch.zeros_like(x[layer]) for layer in LAYERS}
    own = {id: dict(c) for id in problem.client_ids}

    for members, lost in [((0, 1, 2, 3), ()), ((1, 2), ()), ((0, 1, 3), (1,)), ((0, 1, 2, 3), ())]:
        cohort = [problem.client_ids[member] for member in members]
        missing = {problem.client_ids[member] for member in lost}
        federation.round(cohort, lost=missing)
        arrived = [id for id in cohort if id not in missing]
        ys, changes = {}, {}
        for id in arrived:
            y = dict(x)
            for _ in range(STEPS):
                g = problem.gradients(id, y)
                for layer in LAYERS:
                    y[layer] = y[layer] - LR * (g[layer] - own[id][layer] + c[layer])
            after = {layer: own[id][layer] - c[layer] + (x[layer] - y[layer]) / (STEPS * LR) for layer in LAYERS}
            ys[id], changes[id] = y, {layer: after[layer] - own[id][layer] for layer in LAYERS}
            own[id] = after
        for layer in LAYERS:
            x[layer] = x[layer] + sum(ys[id][layer] - x[layer] for id in arrived) / len(arrived)
            c[layer] = c[layer] + sum(changes[id][layer] for id in arrived) / N
            assert close(federation.state.tensors[f"{layer}/W"], x[layer])
            assert close(federation.state.memory[f"{layer}/c"], c[layer])
            for id in arrived:
                assert close(federation.parties[id].memory[f"{layer}/c"], own[id][layer])
            # The server's variate is the mean of the clients' (zero for those that never replied).
            held = [party.memory[f"{layer}/c"] for party in federation.parties.values() if party.memory]
            assert close(torch.stack(held).sum(0) / N, c[layer])


def test_zero_control_variates_are_fedavg() -> None:
    problem = Problem()
    federation = _federation(problem)
    plain = Federation(
        with_extras(FedAvg(spec=problem.adapted().spec), "frozen"), problem, sgd(LR, steps=STEPS), uniform=True
    )
    federation.round()
    plain.round()
    for layer in LAYERS:
        assert torch.equal(federation.state.tensors[f"{layer}/W"], plain.state.tensors[f"{layer}/W"])
    federation.round()
    plain.round()
    assert not close(federation.state.tensors["fc1/W"], plain.state.tensors["fc1/W"], 1e-3)
