"""Turns of a job's groups."""

from __future__ import annotations

import pytest

from fedspan.core.values import Group
from fedspan.errors import FedspanError


@pytest.mark.parametrize(("turns", "turn", "active"), [(1, 0, [0, 1, 2, 3, 4]), (2, 1, [1, 3]), (3, 0, [0, 3])])
def test_a_group_is_active_in_its_turn(turns: int, turn: int, active: list[int]) -> None:
    group = Group(("a",), turns=turns, turn=turn)
    assert [step for step in range(5) if group.is_active(step)] == active
    assert [group.count_steps(steps) for steps in range(6)] == [
        sum(step < steps for step in active) for steps in range(6)
    ]


@pytest.mark.parametrize(("turns", "turn"), [(2, 2), (1, -1), (0, 0)])
def test_a_group_that_would_never_train_is_refused(turns: int, turn: int) -> None:
    with pytest.raises(FedspanError, match="the group would never train"):
        Group(("a",), turns=turns, turn=turn)
