"""Values that a search draws."""

from __future__ import annotations

import numpy as np
import pytest

from fedspan import FedspanError
from fedspan.experiments.search_space import Range, list_combinations, parse_space


def test_draws_are_reproducible_and_in_range() -> None:
    space = parse_space({"training.lr": "1e-4..1e-1", "method.r": "2..9", "method.name": "fedit,rolora"})
    drawn = list_combinations(space, 200, 7)
    assert drawn == list_combinations(space, 200, 7)
    assert drawn[:20] == list_combinations(space, 20, 7)
    assert drawn != list_combinations(space, 200, 8)
    rates = np.array([one["training.lr"] for one in drawn])
    assert rates.min() >= 1e-4
    assert rates.max() <= 1e-1
    # Log-uniform: a third of the draws in each decade, 0.33 ± 0.03 over 200.
    for low in (1e-4, 1e-3, 1e-2):
        assert 0.2 < np.mean((low <= rates) & (rates < 10 * low)) < 0.47
    ranks = [one["method.r"] for one in drawn]
    assert set(ranks) == set(range(2, 10))
    assert all(type(rank) is int for rank in ranks)
    assert {one["method.name"] for one in drawn} == {"fedit", "rolora"}


def test_every_combination_is_drawn_once() -> None:
    space = parse_space({"method.r": "1..3", "training.lr": [0.1, 0.2]})
    drawn = list_combinations(space, 6, 0)
    assert sorted(map(str, drawn)) == sorted(
        str({"method.r": r, "training.lr": lr}) for r in (1, 2, 3) for lr in (0.1, 0.2)
    )
    with pytest.raises(FedspanError, match=r"`--trials`: 7 is not accepted\. Expected at most 6"):
        list_combinations(space, 7, 0)
    with pytest.raises(FedspanError, match="or wider ranges"):
        list_combinations({"a": Range(1.0, 1.0001)}, 20, 0)


def test_values_are_yaml() -> None:
    assert parse_space({"a": "[query],[query, value]", "b": "true, null"}) == {
        "a": (["query"], ["query", "value"]),
        "b": (True, None),
    }
