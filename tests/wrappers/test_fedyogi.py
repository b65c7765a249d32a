"""FedYogi's steps against the formula, written out for one entry after another; its second moment falls slowly."""

from __future__ import annotations

import math

import pytest
import torch

from fedspan.methods.fedit import FedIT
from fedspan.wrappers.fedyogi import FedYogi
from helpers.toys.problem import Problem


def test_steps_are_those_of_a_loop_over_entries() -> None:
    """``v <- v - 0.25 D^2 sign(v - D^2)`` from v = tau^2."""
    optimizer = FedYogi(inner=FedIT(spec=Problem(clients=2).adapted().spec), lr=0.5, beta1=0.6, beta2=0.75, tau=0.1)
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
                first = 0.6 * first + 0.4 * value
                square = value**2
                second += 0.25 * square if second < square else -0.25 * square
                expected = 0.5 * first / (math.sqrt(second) + 0.1)
                assert float(step[row, column]) == pytest.approx(expected, rel=1e-12)


def test_the_second_moment_falls_no_faster_than_it_grows() -> None:
    """A large v that meets small changes loses a share of their squares, where FedAdam's loses a share of itself."""
    optimizer = FedYogi(inner=FedIT(spec=Problem(clients=2).adapted().spec), beta2=0.75)
    v = torch.tensor([4.0, 0.5, 1.0])
    assert optimizer.compute_second(v, torch.ones(3)).tolist() == [3.75, 0.75, 1.0]
