"""The optimizer of a job: its steps against a hand-written loop, its examples, and the gradients that it sums."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedspan.core.parametrization import LoRA
from fedspan.core.values import Group, Job
from fedspan.errors import FedspanError
from fedspan.training.jobs import Assignment
from fedspan.training.loop import LoopEngine
from fedspan.training.trainers.optimizer import JobOptimizer
from helpers.toys.problem import Problem
from helpers.toys.rounds import sgd

LR = 0.25


def built(**changes: Any) -> tuple[JobOptimizer, dict[str, torch.Tensor]]:
    """SGD on the B of both layers; fc1's at half the learning rate."""
    torch.manual_seed(2)
    problem = Problem(clients=1)
    shapes = {"fc1/A": (2, 5), "fc1/B": (8, 2), "fc2/A": (2, 8), "fc2/B": (6, 2)}
    tensors = {name: torch.randn(*shape, dtype=torch.float64) for name, shape in shapes.items()}
    groups = (Group(("fc1/B",), lr_scale=0.5), Group(("fc2/B",)), Group(()))
    job = replace(Job({"fc1": LoRA(1.0), "fc2": LoRA(1.0)}, tensors, groups), **changes)
    engine = LoopEngine(problem.adapted(), problem.task, sgd(LR), seed=7)
    live = {name: value.clone().requires_grad_(name.endswith("B")) for name, value in tensors.items()}
    return JobOptimizer(engine, Assignment("client-0", 0, job, problem.indices["client-0"], LR), live), live


def test_steps_are_those_of_gradient_descent_with_each_group_s_rate() -> None:
    optimizer, live = built()
    assert [group["lr"] for group in optimizer.param_groups] == [LR / 2, LR]
    expected = {name: value.detach().clone() for name, value in live.items()}
    for number in range(3):
        (live["fc1/B"].square().sum() + number * live["fc2/B"].sum()).backward()
        optimizer.count_examples(4)
        optimizer.step()
        expected["fc1/B"] -= LR / 2 * 2 * expected["fc1/B"]
        expected["fc2/B"] -= LR * number
        assert all(value.grad is None for value in live.values())
    for name, value in live.items():
        assert torch.allclose(value, expected[name], rtol=1e-12)
    assert (optimizer.steps, optimizer.examples, optimizer.decay) == (3, 12, 1.0)
    assert optimizer.compute_mean_gradient() == {}


def test_a_step_without_any_gradient_or_with_a_closure_is_refused() -> None:
    optimizer, live = built()
    with pytest.raises(FedspanError, match="no gradient reached the tensors that train in this round"):
        optimizer.step()
    with pytest.raises(FedspanError, match="the optimizer of a round takes no closure"):
        optimizer.step(lambda: 1.0)
    live["fc1/B"].sum().backward()
    before = live["fc2/B"].detach().clone()
    optimizer.step()  # one layer's gradient is enough, and the other's is zero
    assert torch.equal(live["fc2/B"], before)
    assert optimizer.steps == 1


def test_a_probe_averages_gradients_over_examples_and_moves_nothing() -> None:
    optimizer, live = built(steps=0, want_gradient=True)
    assert optimizer.is_probe
    before = live["fc1/B"].detach().clone()
    for factor, examples in ((1.0, 1), (5.0, 3)):
        (factor * live["fc1/B"].sum()).backward()
        optimizer.count_examples(examples)
        optimizer.step()
    assert torch.equal(live["fc1/B"], before)
    found = optimizer.compute_mean_gradient()
    assert torch.equal(found["fc1/B"], torch.full((8, 2), (1.0 + 3 * 5.0) / 4, dtype=torch.float64))


def test_a_job_that_wants_gradients_gets_their_mean_over_steps() -> None:
    optimizer, live = built(want_gradient=True)
    for factor, examples in ((1.0, 1), (5.0, 3)):
        (factor * live["fc1/B"].sum()).backward()
        optimizer.count_examples(examples)
        optimizer.step()
    assert torch.equal(optimizer.compute_mean_gradient()["fc1/B"], torch.full((8, 2), 3.0, dtype=torch.float64))
