"""Local-only training: clients train as if they were alone, and nothing crosses the network."""

from __future__ import annotations

import torch

from fedspan.core.tensors import is_extra, join_tensor_name
from fedspan.core.values import Message
from fedspan.methods.local_only import LocalOnly
from helpers.toys.oracle import copied, descend
from helpers.toys.problem import HEAD, LAYERS, Problem
from helpers.toys.rounds import Federation, close, sgd, with_extras

LR, STEPS = 0.3, 2


def federation(problem: Problem, clients: int) -> Federation:
    method = LocalOnly(spec=problem.adapted().spec, seed=4, r=2)
    return Federation(with_extras(method, "local"), problem, sgd(LR, steps=STEPS), ranks={"client-1": clients})


def test_a_client_s_model_is_lora_from_where_it_left_off() -> None:
    """Whoever else takes part; the oracle trains it by plain gradient descent on dense weights."""
    problem = Problem(clients=3)
    made = federation(problem, 3)
    W, rank = problem.to_dense(*LAYERS), 3
    job = made.job("client-1")
    mine = {one: {s: job.tensors[join_tensor_name(one, s)].double() for s in "AB"} for one in LAYERS}
    assert {one: slots["A"].shape[0] for one, slots in mine.items()} == dict.fromkeys(LAYERS, rank)
    head = problem.to_dense(*HEAD)
    for cohort in (["client-0", "client-1", "client-2"], ["client-1"], ["client-0", "client-2"], ["client-1"]):
        made.round(cohort)
        if "client-1" in cohort:
            mine = copied(mine)
            descend(problem, "client-1", W, head, mine, 4.0 / rank, LR, STEPS)
        for one in LAYERS:
            expected = W[one] + 4.0 / rank * mine[one]["B"] @ mine[one]["A"]
            assert close(made.get_weight(one, "client-1"), expected, 1e-8)


def test_nothing_is_sent_or_stored_on_the_server() -> None:
    problem = Problem(clients=2)
    made = federation(problem, 2)
    made.round()
    assert made.replies == {"client-0": Message(), "client-1": Message()}
    assert made.elements == {"client-0": (0, 0), "client-1": (0, 0)}
    assert made.state.round == 1
    assert all(is_extra(name) for name in made.state.tensors)  # the pretrained head, from which all start
    assert (made.state.memory, made.state.scalars, made.state.base.moved) == ({}, {}, False)
    assert not torch.equal(made.get_weight("fc1", "client-0"), made.get_weight("fc1", "client-1"))


def test_a_client_that_has_not_trained_has_the_pretrained_model() -> None:
    problem = Problem(clients=2)
    made = federation(problem, 2)
    for one in LAYERS:
        assert close(made.get_weight(one, "client-0"), problem.to_dense(one)[one])
