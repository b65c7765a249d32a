"""Clients that are named because their replies were limited often."""

from __future__ import annotations

from fedspan.runs.suspects import find_limited


def test_a_client_that_was_limited_in_most_of_its_rounds_is_named() -> None:
    rows = [
        {"round": number, "cohort": ["a", "b", "c"], "clipped": {"a": 0.5, **({"b": 0.9} if number < 3 else {})}}
        for number in range(1, 7)
    ]
    (warning,) = find_limited([{"round": 0}, *rows])
    assert warning.startswith(
        "The changes of a were scaled down in 6 of its 6 rounds, to 50% on average (federation.clip_ratio)"
    )


def test_a_client_that_was_limited_twice_is_not_named() -> None:
    assert find_limited([{"cohort": ["a"], "clipped": {"a": 0.5}}] * 2) == ()
    assert find_limited([{"cohort": ["a"]}] * 9) == ()


def test_a_client_whose_weight_was_lowered_is_named_at_once() -> None:
    (warning,) = find_limited([{"cohort": ["a", "b"], "lowered_weights": {"b": 0.1}}, {"cohort": ["a"]}])
    assert warning.startswith(
        "The weight of b was lowered in 1 of its 1 rounds: it declares more examples than it was admitted with"
    )
