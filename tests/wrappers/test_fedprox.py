"""FedProx against a hand-written loop."""

from __future__ import annotations

import torch

from fedspan.core.penalties import Proximal
from fedspan.core.tensors import tensor_name
from fedspan.core.values import Job
from fedspan.methods.fedit import FedIT
from fedspan.methods.local_only import LocalOnly
from fedspan.methods.pfedloru import PFedLoRU
from fedspan.wrappers.extras import WithExtras
from fedspan.wrappers.fedprox import FedProx
from toys.oracle import average, copied, pair_gradients
from toys.problem import HEAD, LAYERS, Problem
from toys.rounds import Double, Federation, close, sgd, with_extras

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


def test_a_later_phase_is_held_near_the_start_of_the_round() -> None:
    """The head trains in both of pFedLoRU's phases: in the second its reference is still what the server sent."""
    problem = Problem(clients=1)
    inner = WithExtras(inner=PFedLoRU(spec=problem.adapted().spec, r=2, tau=5), policy="average")
    federation = Federation(Double(inner=FedProx(inner=inner, mu=MU)), problem, sgd(LR, steps=STEPS))
    jobs: list[Job] = []
    train = federation.engine.train

    def watched(job: Job, *args: object, **options: object) -> object:
        jobs.append(job)
        return train(job, *args, **options)  # type: ignore[arg-type]

    federation.engine.train = watched  # type: ignore[method-assign, assignment]
    federation.round()
    first, second = jobs
    for name in HEAD:
        key = f"extras/{name}"
        penalty = second.penalties[-1]
        assert isinstance(penalty, Proximal)
        assert torch.equal(penalty.reference[key], first.tensors[key])
        assert not torch.equal(penalty.reference[key], second.tensors[key])
    assert len(first.penalties) == len(second.penalties) == 1


def test_refused_where_nothing_is_shared() -> None:
    method = LocalOnly(spec=Problem(clients=1).adapted().spec)
    refusal = FedProx(inner=method).refusal(method.declared())
    assert refusal is not None
    assert "share none" in refusal
