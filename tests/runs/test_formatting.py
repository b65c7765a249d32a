"""Numbers, times and names as runs show them."""

from __future__ import annotations

import pytest

from fedspan.runs.formatting import format_duration, format_number, format_runs, get_title, shorten


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.123456, "0.1235"),
        (-2.0, "-2.0000"),
        (999.99, "999.9900"),
        (1000.0, "1e+03"),
        (-123456.0, "-1.23e+05"),
        (float("nan"), "nan"),
    ],
)
def test_losses(value: float | None, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0:00"),
        (59.6, "1:00"),
        (75, "1:15"),
        (3599.4, "59:59"),
        (3600, "1:00:00"),
        (3675, "1:01:15"),
        (1e6, "277:46:40"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_numbers_of_runs() -> None:
    assert [format_runs(count) for count in (0, 1, 2)] == ["0 runs", "1 run", "2 runs"]


def test_texts_become_one_short_line() -> None:
    assert shorten(" a\n b\t c ", 5) == "a b c"
    assert shorten("abcdef", 5) == "abcd…"
    assert len(shorten("ab " * 99, 20)) == 20
    assert shorten("ab", 0) == "…"


def test_titles_of_baselines() -> None:
    assert [get_title(name) for name in ("local", "centralized", "mine")] == ["local only", "centralized", "mine"]
