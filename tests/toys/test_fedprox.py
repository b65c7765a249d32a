"""FedProx against a hand-written loop."""

from __future__ import annotations

import torch

from fedspan.core.tensors import tensor_name
from fedspan.methods.fedit import FedIT
from fedspan.wrappers.extras import WithExtras

from .fedprox import FedProx
from .oracle import average, copied, pair_gradients
from .problem import HEAD, LAYERS, Problem
from .rounds import Double, Federation, close, sgd, with_extras

LR, MU, SCALING, STEPS = 0.3, 0.7, 2.0, 3


def _federation(problem: Problem, mu: float) -> Federation:
    inner = WithExtras(inner=FedIT(spec=problem.adapted().spec, seed=6, r=2, lora_alpha=4.0), policy="average")
    return Federation(Double(inner=FedProx(inner=inner, mu=mu)), problem, sgd(LR, steps=STEPS))


def test_matches_the_hand_written_loop() -> None:
    problem = Problem()
    federation = _federation(problem, MU)
    W, head = problem.dense(*LAYERS), problem.dense(*HEAD)
    server = {one: {s: federation.state.tensors[tensor_name(one, s)].double() for s in "AB"} for one in LAYERS}
    for _ in range(2):
        federation.round()
        shares = problem.shares(problem.client_ids)
        models = []
        for id in problem.client_ids:
            mine, own_head = copied(server), dict(head)
            for _ in range(STEPS):
                by_pair, by_head = pair_gradients(problem, id, W, own_head, mine, SCALING)
                for one in LAYERS:
                    for s in "AB":
                        pull = MU * (mine[one][s] - server[one][s])
                        mine[one][s] = mine[one][s] - LR * (by_pair[one][s] + pull)
                for name in HEAD:
                    own_head[name] = own_head[name] - LR * (by_head[name] + MU * (own_head[name] - head[name]))
            flat = {tensor_name(one, s): mine[one][s] for one in LAYERS for s in "AB"}
            models.append((shares[id], {**flat, **own_head}))
        mean = average(models)
        server = {one: {s: mean[tensor_name(one, s)] for s in "AB"} for one in LAYERS}
        head = {name: mean[name] for name in HEAD}
        for one in LAYERS:
            for s in "AB":
                assert close(federation.state.tensors[tensor_name(one, s)], server[one][s])
        for name in HEAD:
            assert close(federation.state.tensors[f"extras/{name}"], head[name])


def test_without_strength_it_is_the_inner_method_bit_for_bit() -> None:
    problem = Problem(clients=2)
    federation = _federation(problem, 0.0)
    inner = FedIT(spec=problem.adapted().spec, seed=6, r=2, lora_alpha=4.0)
    plain = Federation(with_extras(inner), problem, sgd(LR, steps=STEPS))
    federation.round()
    plain.round()
    for name, value in plain.state.tensors.items():
        assert torch.equal(federation.state.tensors[name], value)
