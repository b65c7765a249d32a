"""Trimmed means of reported metrics, and when too few clients report them."""

from __future__ import annotations

import numpy as np

from fedspan.federation.trimmed_scores import (
    compute_trimmed_means,
    count_trimmed_clients,
    describe_few_nodes,
    describe_few_reports,
)


def test_a_trimmed_mean_is_within_the_range_of_the_other_clients() -> None:
    """Whichever client lies, whatever it reports and whatever it weighs."""
    rng = np.random.default_rng(0)
    for count in (3, 4, 5, 10, 11):
        for lie in (-1e9, 0.0, 1.0, 1e9):
            values, weights = rng.random(count), rng.integers(1, 9, count).astype(float)
            rows = {f"c{number}": {"loss": values[number], "examples": weights[number]} for number in range(count)}
            liar = f"c{rng.integers(count)}"
            others = [row["loss"] for id, row in rows.items() if id != liar]
            rows[liar] = {"loss": lie, "examples": 1e6}
            mean = compute_trimmed_means(rows, ["loss", "accuracy"])
            assert mean.keys() == {"loss"}
            assert min(others) <= mean["loss"] <= max(others)
    three = {id: {"loss": loss, "examples": 5.0} for id, loss in (("a", 0.1), ("b", 0.4), ("c", 9.0))}
    assert compute_trimmed_means(three, ["loss"]) == {"loss": 0.4}


def test_a_note_says_when_the_metrics_of_the_nodes_select_no_round() -> None:
    assert [count_trimmed_clients(count) for count in (1, 2, 3, 4, 5, 10, 11)] == [0, 0, 1, 1, 1, 1, 2]
    few = {(evaluated, sent): describe_few_reports(evaluated, sent) for evaluated in range(1, 6) for sent in range(6)}
    assert {pair for pair, note in few.items() if note} == {(n, sent) for n in (3, 4, 5) for sent in (0, 1, 2)}
    assert [describe_few_nodes(count) is None for count in (1, 2, 3, 4, 5, 50)] == [True, False, True, True, True, True]
