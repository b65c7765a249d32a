"""The rule of the claims' verdicts."""

from __future__ import annotations

import math

import pytest

from fedspan.experiments.verdict import compare_pairs, compare_to


@pytest.mark.parametrize(
    ("better", "worse", "expected"),
    [
        ([3.0, 4.0, 5.0], [1.0, 2.0, 3.0], "holds"),
        ([1.0, 2.0, 3.0], [3.0, 4.0, 5.0], "contradicted"),
        ([10.0, 20.0, 30.0], [9.0, 19.0, 29.0], "holds"),  # paired: seeds differ by far more than methods
        ([1.0, 2.0, 9.0], [3.0, 1.0, 2.0], "inconclusive"),
        ([1.0, 1.0], [1.0, 1.0], "inconclusive"),
        ([9.0], [1.0], "inconclusive"),  # one seed says nothing of its error
    ],
)
def test_paired(better: list[float], worse: list[float], expected: str) -> None:
    assert compare_pairs(better, worse).verdict == expected


def test_two_standard_errors_are_the_border() -> None:
    """Differences 0, 1, 2 + shift: mean 1 + shift, standard error 1 / sqrt(3)."""
    border = 2 / math.sqrt(3) - 1
    for shift, expected in ((border - 1e-6, "inconclusive"), (border + 1e-6, "holds")):
        found = compare_pairs([shift, 1 + shift, 2 + shift], [0.0, 0.0, 0.0])
        assert found.verdict == expected
        assert found.error == pytest.approx(1 / math.sqrt(3))


@pytest.mark.parametrize(
    ("values", "expected"),
    [([55.0, 56.0, 54.0], "holds"), ([70.0, 71.0, 72.0], "contradicted"), ([50.0, 60.0, 70.0], "inconclusive")],
)
def test_near(values: list[float], expected: str) -> None:
    assert compare_to(values, 55.0, 5.0).verdict == expected


def test_values_that_do_not_pair_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        compare_pairs([1.0, 2.0], [1.0])
