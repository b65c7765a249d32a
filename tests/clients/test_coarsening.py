"""Metrics and losses of a data owner are rounded relative to their bounds, so that small groups do not show."""

from __future__ import annotations

import math

import pytest

from fedspan.clients.coarsening import coarsen_losses, coarsen_metrics
from fedspan.federation.protocol import Part


def test_metrics_tell_no_exact_counts() -> None:
    """A model that gives all examples one label would measure how many have it."""
    counted = {
        count: coarsen_metrics({"accuracy": count / 50, "examples": 50.0}, 10, 6.0)["accuracy"] for count in range(51)
    }
    assert sorted(set(counted.values())) == pytest.approx([step / 10 for step in range(11)])
    assert all(abs(value - count / 50) <= 0.05 + 1e-9 for count, value in counted.items())
    assert coarsen_metrics({"accuracy": 1.0, "examples": 9.0}, 10, 6.0) == {}
    exact = {"accuracy": 0.123, "loss": 1e9, "reward_margin": 1e9, "examples": 9.0}
    assert coarsen_metrics(exact, 1, 6.0) == exact


def test_a_loss_is_rounded_relative_to_its_bound() -> None:
    counted = [coarsen_metrics({"loss": 3.0 * count / 50, "examples": 50.0}, 10, 3.0)["loss"] for count in range(51)]
    assert sorted(set(counted)) == pytest.approx([0.3 * step for step in range(11)])
    assert coarsen_metrics({"loss": 1e9, "examples": 50.0}, 10, 3.0)["loss"] == 3.0


def test_other_metrics_have_their_own_scale_and_range() -> None:
    scores = {"bleu": 33.0, "pearson": -0.98, "perplexity": 40.0, "loss": math.log(40.0), "examples": 50.0}
    coarse = coarsen_metrics({**scores, "reward_margin": 3.0, "unknown": 1.0}, 10, 6.0)
    assert list(coarse) == ["bleu", "pearson", "perplexity", "loss", "examples"]  # what has no bounds is left out
    assert coarse["bleu"] == pytest.approx(30.0)
    assert coarse["pearson"] == pytest.approx(-1.0)
    assert coarse["loss"] == pytest.approx(3.6)
    assert coarse["perplexity"] == pytest.approx(math.exp(3.6))
    assert coarsen_metrics({"perplexity": 40.0, "examples": 50.0}, 10, 6.0) == {"examples": 50.0}


@pytest.mark.parametrize("count", [10, 11, 13, 16, 29])
def test_a_rounded_metric_is_one_that_a_client_can_have(count: int) -> None:
    """13 examples: the multiple of 5 / 13 that is next to 1 is 1.15, which a server does not believe."""
    scores = {"accuracy": 1.0, "matthews": -1.0, "loss": 6.0, "examples": float(count)}
    coarse = coarsen_metrics(scores, 10, 6.0)
    assert coarse["accuracy"] <= 1.0
    assert coarse["matthews"] >= -1.0
    assert coarse["loss"] <= 6.0


def test_losses_of_a_training_are_bounded_and_rounded() -> None:
    parts = (Part(loss=1.23, examples=100.0), Part(loss=1e30, examples=300.0))
    assert coarsen_losses(parts, 100, 1, 3.0) == parts
    coarse = coarsen_losses(parts, 100, 10, 3.0)
    assert [part.loss for part in coarse] == pytest.approx([1.2, 3.0])  # multiples of 5 / 100 of 3, for 3 uses alike
    assert [part.examples for part in coarse] == [100.0, 300.0]


@pytest.mark.parametrize(("used", "owned"), [(1.0, 100), (9.0, 100), (900.0, 9)])
def test_losses_of_few_examples_are_not_reported(used: float, owned: int) -> None:
    parts = (Part(loss=1.0, examples=100.0), Part(loss=1.0, examples=used))
    assert coarsen_losses(parts, owned, 10, 3.0) == ()
