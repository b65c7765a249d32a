"""The steps of a comparison, and its table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedspan import CompareReport, FedspanError
from fedspan.experiments.comparison import CompareRow, plan_comparison
from helpers.compared_methods import values_of


def test_a_partition_that_the_config_names_is_kept(tiny_folder: Path) -> None:
    values = values_of(tiny_folder, partition={"seed": 77})
    plan = plan_comparison(values, ["fedloru"], [1, 2], {}, None)
    assert {step.config.partition.seed for step in plan.steps} == {77}


@pytest.mark.parametrize(
    ("row", "words"), [("fedprox", "Put it around a method: fedit+fedprox"), ("fedit+fedproks", "no wrapper is named")]
)
def test_rows_that_are_no_methods(row: str, words: str, tiny_folder: Path) -> None:
    with pytest.raises(FedspanError, match=re.escape(words)) as caught:
        plan_comparison(values_of(tiny_folder), [row], [0], {}, None)
    assert (caught.value.field, caught.value.value) == ("--methods", row)


def test_a_score_that_is_missing_leaves_no_mean() -> None:
    row = CompareRow("fedit", (0.5, None), None, None, 0.1, None, None, 1.0, 2.0, 3.0)
    report = CompareReport("pearson", "test", True, "flora", (0, 1), (row,), "folder")
    assert report.build_table().rows[0][1:4] == ("-", "+0.1000", "-")
    assert report.build_table().best is None
    assert report.tabulate_seeds().rows == (("fedit", "0.5000", "-"),)
