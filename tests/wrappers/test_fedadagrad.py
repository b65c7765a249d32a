"""FedAdagrad's steps against the formula, written out for one entry after another."""

from __future__ import annotations

import math

import pytest
import torch

from fedspan.methods.fedit import FedIT
from fedspan.wrappers.fedadagrad import FedAdagrad
from helpers.toys.problem import Problem


def test_steps_are_those_of_a_loop_over_entries() -> None:
    """``v <- v + D^2`` from v = tau^2, and no momentum unless the user asks for it."""
    optimizer = FedAdagrad(inner=FedIT(spec=Problem(clients=2).adapted().spec), lr=0.5, tau=0.1)
    changes = torch.randn(5, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    moments = {kind: torch.full((3, 2), optimizer.get_initial(kind), dtype=torch.float64) for kind in optimizer.moments}
    steps = []
    for change in changes:
        step, moments = optimizer.step(change, moments)
        steps.append(step)
    for row in range(3):
        for column in range(2):
            first, second = 0.0, 0.1**2
            for change, step in zip(changes, steps, strict=True):
                value = float(change[row, column])
                first = value
                second += value**2
                expected = 0.5 * first / (math.sqrt(second) + 0.1)
                assert float(step[row, column]) == pytest.approx(expected, rel=1e-12)


def test_momentum_may_be_requested() -> None:
    optimizer = FedAdagrad(inner=FedIT(spec=Problem(clients=2).adapted().spec), lr=2.0, beta1=0.5, tau=1.0)
    step, moments = optimizer.step(torch.tensor([4.0]), {"m": torch.tensor([2.0]), "v": torch.tensor([9.0])})
    assert moments["m"].tolist() == [3.0]  # 0.5 * 2 + 0.5 * 4
    assert moments["v"].tolist() == [25.0]  # 9 + 4^2
    assert step.tolist() == [1.0]  # 2 * 3 / (5 + 1)
