"""Numbers of columns of texts: decimal points, decimal commas, and what may be either."""

from __future__ import annotations

import pytest

from fedspan.data.numbers import is_ambiguous, parse_numbers


@pytest.mark.parametrize(
    ("texts", "numbers"),
    [
        (["1", "-2.5", "1e3", "+.5"], [1, -2.5, 1000, 0.5]),
        (["3,5", "4", "-0,25", "+12,125"], [3.5, 4, -0.25, 12.125]),
        (["1.234,5", "1.234", "12 345,0", "9'000,25", "1\u202f000"], [1234.5, 1234, 12345, 9000.25, 1000]),
        (["0,125", "3,500"], [0.125, 3.5]),
        (["3,500", "4,125"], [None, None]),
        (["1,234,567", "2,5"], [None, None]),
        (["1,234.5", "2,5", "3"], [None, None, 3]),
        (["3,5", "4.5", "x, y"], [3.5, None, None]),
        (["nan", "inf", "", "one", None], [None] * 5),
    ],
)
def test_numbers(texts: list[str | None], numbers: list[float | None]) -> None:
    assert parse_numbers(texts) == numbers


def test_a_column_keeps_its_numbers_if_others_are_left_out() -> None:
    texts = ["3,5", "4,125", "x, y", "4.5"]
    valid = [text for text, number in zip(texts, parse_numbers(texts), strict=True) if number is not None]
    assert parse_numbers(valid) == [3.5, 4.125]


@pytest.mark.parametrize(
    ("text", "expected"), [("3,500", True), ("0,500", False), ("3,50", False), ("1.000,500", False)]
)
def test_ambiguous_commas(text: str, expected: bool) -> None:
    assert is_ambiguous(text) is expected
