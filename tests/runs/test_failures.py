"""Failures by client, counted from the lines of a run's metrics."""

from __future__ import annotations

import pytest

from fedspan.federation.progress import Failure
from fedspan.runs.failures import count_failures


def test_failures_are_counted_by_client_with_the_last_one() -> None:
    """Sorted by client, whatever the order of the rounds' failures; those of the end are the last."""
    rows = [
        {"round": 1, "failures": [{"client": "b", "reason": "late"}, {"client": "a", "reason": "offline"}]},
        {"round": 2},
        {"round": 3, "failures": [{"client": "b", "reason": "offline"}, {"client": "b", "reason": "late"}]},
    ]
    found = count_failures(rows, 2, [Failure("c", 0, "full disk"), Failure("a", 0, "no adapter")])
    assert list(found) == ["a", "b", "c"]
    assert found == {
        "a": {"count": 2, "round": 2, "reason": "no adapter"},
        "b": {"count": 3, "round": 3, "reason": "late"},
        "c": {"count": 1, "round": 2, "reason": "full disk"},
    }


@pytest.mark.parametrize(
    "failures",
    [None, "late", 5, {"client": "a", "reason": "late"}, [None, "a", {"client": "a"}, {"client": 1, "reason": "x"}]],
)
def test_what_a_run_does_not_write_is_ignored(failures: object) -> None:
    assert count_failures([{"round": 1, "failures": failures}]) == {}
