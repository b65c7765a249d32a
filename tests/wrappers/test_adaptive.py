"""What adaptive server optimizers share: their first moment, their step and where their moments begin."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fedspan.methods.fedit import FedIT
from fedspan.wrappers.adaptive import Adaptive
from fedspan.wrappers.fedadagrad import FedAdagrad
from fedspan.wrappers.fedadam import FedAdam
from fedspan.wrappers.fedyogi import FedYogi
from helpers.toys.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Recorded(Adaptive):
    """A second moment that shows what it is given: ``v + 3 D^2``."""

    def compute_second(self, v: Tensor, squared: Tensor) -> Tensor:
        return v + 3 * squared


def test_a_step_divides_the_first_moment_by_the_root_of_the_new_second_one() -> None:
    """The second moment is updated first, and tau is added to its root, not under it."""
    optimizer = Recorded(inner=FedIT(spec=Problem(clients=2).adapted().spec), lr=6.0, beta1=0.75, tau=1.0)
    change = torch.tensor([[1.0, -2.0]])
    before = {"m": torch.tensor([[1.0, 2.0]]), "v": torch.tensor([[1.0, 4.0]])}
    step, after = optimizer.step(change, before)
    assert after["m"].tolist() == [[1.0, 1.0]]  # 0.75 m + 0.25 D
    assert after["v"].tolist() == [[4.0, 16.0]]
    assert step.tolist() == [[2.0, pytest.approx(1.2)]]  # 6 m / (sqrt(v) + 1)
    assert before["v"].tolist() == [[1.0, 4.0]]


@pytest.mark.parametrize("cls", [FedAdagrad, FedAdam, FedYogi])
def test_the_second_moment_begins_at_the_square_of_tau_and_the_first_at_zero(cls: type[Adaptive]) -> None:
    """A change far below tau moves by about lr / tau of itself, whichever rule there is."""
    optimizer = cls(inner=FedIT(spec=Problem(clients=2).adapted().spec), lr=1.0, beta1=0.0, tau=0.25)
    assert {kind: optimizer.get_initial(kind) for kind in optimizer.moments} == {"m": 0.0, "v": 0.0625}
    start = {kind: torch.tensor(optimizer.get_initial(kind), dtype=torch.float64) for kind in optimizer.moments}
    step, _ = optimizer.step(torch.tensor(1e-6, dtype=torch.float64), start)
    assert float(step) == pytest.approx(1e-6 / 0.5, rel=5e-3)
