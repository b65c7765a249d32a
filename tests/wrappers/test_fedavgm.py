"""FedAvgM against the formula, entry by entry, and without momentum against the method that it wraps."""

from __future__ import annotations

import pytest
import torch

from fedspan.methods.fedit import FedIT
from fedspan.wrappers.extras import WithExtras
from fedspan.wrappers.fedavgm import FedAvgM
from helpers.toys.problem import Problem
from helpers.toys.rounds import Double, Federation, close, sgd

LR = 0.3


def test_fedavgm_without_momentum_is_the_method() -> None:
    """x + 1 (mean - x), to a rounding."""
    problem = Problem(clients=2)
    inner = WithExtras(inner=FedIT(spec=problem.adapted().spec, r=2), policy="average")
    plain = Federation(Double(inner=inner), problem, sgd(LR))
    wrapped = Federation(Double(inner=FedAvgM(inner=inner, momentum=0.0)), problem, sgd(LR))
    for _ in range(3):
        plain.round()
        wrapped.round()
    for name, value in plain.state.tensors.items():
        assert close(wrapped.state.tensors[name], value, 1e-12)


def test_steps_are_those_of_a_loop_over_entries() -> None:
    """``v <- 0.6 v + D;  x <- x + 0.5 v``, from v = 0."""
    optimizer = FedAvgM(inner=FedIT(spec=Problem(clients=2).adapted().spec), lr=0.5, momentum=0.6)
    changes = torch.randn(4, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    moments = {"v": torch.full((3, 2), optimizer.get_initial("v"), dtype=torch.float64)}
    by_hand = [[0.0] * 2 for _ in range(3)]
    for change in changes:
        step, moments = optimizer.step(change, moments)
        assert moments.keys() == {"v"}
        for row, values in enumerate(change.tolist()):
            for column, value in enumerate(values):
                by_hand[row][column] = 0.6 * by_hand[row][column] + value
                assert float(step[row, column]) == pytest.approx(0.5 * by_hand[row][column], rel=1e-12)
