"""FedAdam's steps against the formula, written out for one entry after another."""

from __future__ import annotations

import math

import pytest
import torch

from fedspan.methods.fedit import FedIT
from fedspan.wrappers.fedadam import FedAdam
from helpers.toys.problem import Problem


def test_steps_are_those_of_a_loop_over_entries() -> None:
    """``v <- 0.75 v + 0.25 D^2`` from v = tau^2, and no bias correction."""
    optimizer = FedAdam(inner=FedIT(spec=Problem(clients=2).adapted().spec), lr=0.5, beta1=0.6, beta2=0.75, tau=0.1)
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
                second = 0.75 * second + 0.25 * value**2
                expected = 0.5 * first / (math.sqrt(second) + 0.1)
                assert float(step[row, column]) == pytest.approx(expected, rel=1e-12)
