"""A series of runs: seeds, the fields that its configs share, and statistics that no missing value distorts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fedspan.config import parse_config
from fedspan.config.run import RunConfig
from fedspan.errors import FedspanError
from fedspan.experiments.series import (
    compute_deviation,
    compute_mean,
    compute_standard_error,
    get_finite,
    require_comparable,
    set_seed,
    validate_seeds,
)


def config(**changes: Any) -> RunConfig:
    return parse_config({"data": {"train": "train.csv"}, "seed": 1, **changes})


def test_seeds_are_different_whole_numbers() -> None:
    assert validate_seeds([0, 2**63 - 1]) == (0, 2**63 - 1)
    for seeds, why in (
        ([], "at least one whole number"),
        ([-1], "a whole number from 0"),
        ([2**63], "a whole number from 0"),
        ([True], "a whole number from 0"),
        ([0.5], "a whole number from 0"),
        ([3, 4, 3], "the seed 3 is given twice"),
    ):
        with pytest.raises(FedspanError, match=why) as caught:
            validate_seeds(seeds)
        assert caught.value.field == "--seeds"


def test_all_seeds_share_the_partition_of_the_first_unless_the_config_has_one() -> None:
    """The config itself stays as it is."""
    some = config(baselines=["centralized"])
    changed = set_seed(some, 7, 5, baselines=False)
    assert (changed.seed, changed.partition.seed, changed.baselines) == (7, 5, [])
    assert set_seed(some, 7, 5, baselines=True).baselines == ["centralized"]
    assert set_seed(config(partition={"seed": 3}), 7, 5, baselines=True).partition.seed == 3
    assert (some.seed, some.partition.seed) == (1, None)


def test_runs_of_other_data_or_another_metric_are_not_comparable() -> None:
    shared, same = config(), config(method={"name": "fedavg"})
    assert require_comparable(shared, same, "--methods", "fedavg") is same
    for changes, words in (
        ({"data": {"train": "other.csv"}}, "data"),
        ({"partition": {"clients": 3}}, "partition"),
        ({"seed": 2}, "seed"),
        ({"evaluation": {"metric": "loss"}}, "evaluation.metric"),
    ):
        with pytest.raises(FedspanError, match=words) as caught:
            require_comparable(shared, config(**changes), "--set", "a value")
        assert (caught.value.field, caught.value.value) == ("--set", "a value")


def test_statistics_have_no_value_if_any_is_missing() -> None:
    values = [1.0, 2.0, 6.0]
    assert compute_mean(values) == 3.0
    assert compute_deviation(values) == pytest.approx(math.sqrt((4 + 1 + 9) / 2))
    assert compute_standard_error(values) == pytest.approx(math.sqrt(7 / 3))
    for function in (compute_mean, compute_deviation, compute_standard_error):
        assert function([1.0, None, 6.0]) is None
        assert function([]) is None
    assert compute_mean([5.0]) == 5.0
    assert compute_deviation([5.0]) is compute_standard_error([5.0]) is None


def test_a_metric_that_is_missing_or_not_finite_has_no_value() -> None:
    scores = {"accuracy": 1, "loss": math.nan, "perplexity": math.inf, "f1": None}
    assert get_finite(scores, "accuracy") == 1.0
    assert [get_finite(scores, name) for name in ("loss", "perplexity", "f1", "missing")] == [None] * 4
    assert get_finite(None, "accuracy") is None
