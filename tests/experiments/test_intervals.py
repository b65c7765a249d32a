"""Intervals of differences: their sources of noise, and the words that follow them."""

import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from scipy import stats

from fedspan.errors import FedspanError
from fedspan.experiments.intervals import Difference, compare_clients, estimate_difference
from fedspan.experiments.tables import describe_majority
from fedspan.runs.predictions import Items, read_items
from fedspan.tasks.label_scores import score_labels

TARGETS = np.array([0, 1, 2] * 100)


def predict(wrong: int, start: int = 0, examples: str = "one") -> Items:
    """Predictions of which some in a row are wrong."""
    predicted = TARGETS.copy()
    predicted[start : start + wrong] = (predicted[start : start + wrong] + 1) % 3
    return Items(TARGETS, predicted[None], ("a", "b", "c"), examples)


def difference(first: list[Items], second: list[Items], metric: str = "accuracy") -> Difference:
    rows = np.arange(len(TARGETS))
    scores = [[items.compute_score(metric, rows) for items in side] for side in (first, second)]
    return estimate_difference(metric, *scores, list(zip(first, second, strict=True)))


def test_one_example_is_no_measurable_difference() -> None:
    found = difference([predict(30)], [predict(31)])
    assert found.mean == pytest.approx(1 / 300)
    assert not found.is_measurable
    assert found.describe("accuracy", "the start") == "not measurably different from the start (+0.3, -0.3 to +1.0)"


def test_many_examples_are_above_or_below() -> None:
    found = difference([predict(30)], [predict(60)])
    error = np.repeat([1.0, 0.0], [30, 270]).std(ddof=1) / math.sqrt(300)
    assert (found.low, found.high) == pytest.approx((0.1 - 1.96 * error, 0.1 + 1.96 * error), abs=1e-4)
    assert found.describe("accuracy", "the start") == "10.0 points (6.6 to 13.4) above the start"
    assert difference([predict(60)], [predict(30)]).describe("accuracy", "it") == "10.0 points (6.6 to 13.4) below it"


def test_seeds_and_items_both_widen_the_interval() -> None:
    first, second = [predict(30), predict(20), predict(10)], [predict(60), predict(60), predict(60)]
    both = difference(first, second)
    seeds = estimate_difference("accuracy", [0.9, 0.9 + 1 / 30, 0.9 + 2 / 30], [0.8] * 3)
    half = stats.t.ppf(0.975, 2) * (1 / 30) / math.sqrt(3)
    assert seeds.high - seeds.mean == pytest.approx(half)
    assert seeds.describe("accuracy", "it").endswith("(5.1 to 21.6; without the noise of the test items) above it")
    by_seeds = (1 / 30) / math.sqrt(3)
    correct = [(items.predicted[0] == TARGETS).astype(float) for items in (*first, *second)]
    by_items = (np.mean(correct[:3], axis=0) - np.mean(correct[3:], axis=0)).std(ddof=1) / math.sqrt(300)
    total = math.hypot(by_seeds, by_items)
    assert both.high - both.mean == pytest.approx(stats.t.ppf(0.975, 2 * (total / by_seeds) ** 4) * total)


def test_other_metrics_are_resampled() -> None:
    found = difference([predict(30)], [predict(60)], "macro_f1")
    assert found.is_measurable
    assert found.high - found.low == pytest.approx(2 * 3.4e-2, rel=0.2)


def test_without_items_one_seed_has_no_interval() -> None:
    found = estimate_difference("loss", [0.5], [0.75], [(predict(1), predict(2))])  # a loss is no score of classes
    assert found == Difference(-0.25, note="one seed: no interval")
    assert found.describe("loss", "the start") == "0.2500 below the start (one seed: no interval)"


def test_clients_are_the_sample_of_their_own_tests() -> None:
    first = {f"c{number}": {"accuracy": 0.5 + number / 10} for number in range(4)}
    second = {id: {"accuracy": scores["accuracy"] - 0.2 + 0.01 * (-1) ** int(id[1])} for id, scores in first.items()}
    found = compare_clients("accuracy", first, second)
    assert found is not None
    assert found.is_measurable
    assert found.mean == pytest.approx(0.2)
    assert compare_clients("accuracy", first, {}) is None


def test_clients_without_both_scores_are_counted() -> None:
    first: dict[str, dict[str, float]] = {f"c{number}": {"accuracy": 0.5 + number / 10} for number in range(3)}
    second = {"c0": {"accuracy": 0.4}, "c1": {"accuracy": 0.4}, "c2": {}, "c3": {"accuracy": 0.4}}
    found = compare_clients("accuracy", first, second)
    assert found is not None
    assert found.note == "2 of 4 clients have both scores"
    assert found.describe("accuracy", "it").endswith("; 2 of 4 clients have both scores)")
    one = compare_clients("accuracy", {"a": {"accuracy": 0.5}, "b": {"accuracy": math.nan}}, {"a": {"accuracy": 0.4}})
    assert one is not None
    assert one.low is None
    assert one.describe("accuracy", "it") == (
        "10.0 points above it (one client: no interval; 1 of 2 clients have both scores)"
    )


def test_equal_differences_have_no_interval() -> None:
    found = estimate_difference("accuracy", [0.9, 0.8], [0.8, 0.7])  # equal but for rounding
    assert found.low is None
    assert (
        found.describe("accuracy", "it") == "10.0 points above it (all 2 seeds have the same difference: no interval)"
    )
    assert difference([predict(30)], [predict(30)]).describe("accuracy", "it") == "equal to it"
    by_client = {id: {"accuracy": 0.5} for id in "ab"}
    assert compare_clients("accuracy", by_client, by_client) == Difference(
        0.0, note="all 2 clients have the same difference: no interval"
    )


def test_a_score_that_is_not_a_number_is_not_compared() -> None:
    for first in ([math.nan], [0.5, math.nan]):
        found = estimate_difference("accuracy", first, [0.5] * len(first))
        assert not found.is_measurable
        assert found.describe("accuracy", "it") == "not comparable with it (a score is not a number)"


def test_test_items_count_only_if_both_sides_have_the_same() -> None:
    """Equal targets are not enough; and where each seed has a test set of its own, the spread includes the items."""
    scores = [0.9, 0.8], [0.7, 0.75]
    others = [(predict(30, examples=name), predict(60, examples=f"other {name}")) for name in ("one", "two")]
    assert estimate_difference("accuracy", *scores, others).note == "without the noise of the test items"
    own = [(predict(30, examples=name), predict(60, examples=name)) for name in ("one", "two")]
    alone = estimate_difference("accuracy", *scores, own)
    assert alone.note == ""
    assert alone.high - alone.mean == pytest.approx(stats.t.ppf(0.975, 1) * 0.075)
    with pytest.raises(ValueError, match="1 pairs of predictions for 2 seeds"):
        estimate_difference("accuracy", *scores, own[:1])


def test_scores_of_classes_are_those_of_scikit_learn() -> None:
    from sklearn import metrics

    targets, predicted = np.array([0, 1, 1, 0, 1]), np.array([0, 1, 0, 1, 1])
    assert score_labels("macro_f1", targets, predicted) == pytest.approx(
        metrics.f1_score(targets, predicted, average="macro")
    )
    assert score_labels("f1", targets, predicted) == pytest.approx(metrics.f1_score(targets, predicted))
    assert score_labels("matthews", targets, predicted) == pytest.approx(metrics.matthews_corrcoef(targets, predicted))


def test_the_majority_class_is_that_of_the_targets() -> None:
    items = Items(np.array([0, 0, 0, 1]), np.zeros((1, 4), np.int32), ("a", "b"), "one")
    assert describe_majority("accuracy", items).startswith("Majority class: 75.0 % of the held-out")
    assert describe_majority("loss", items) == describe_majority("accuracy", None) == ""


@pytest.mark.parametrize(
    ("predicted", "labels"),
    [([[0, 1]], '["a", "b"]'), ([[0, 1, 2]], '["a", "b"]'), ([[0, 1, 1]], "7"), ([[0, 1, 1]], '"ab"')],
)
def test_damaged_predictions_are_refused(tmp_path: Path, predicted: list[list[int]], labels: str) -> None:
    assert read_items(tmp_path) is None
    (tmp_path / "predictions").mkdir()
    tensors = {"targets": np.zeros(3, np.int32), "predicted": np.array(predicted, np.int32)}
    path = tmp_path / "predictions" / "result.safetensors"
    metadata = {"fedspan": f'{{"labels": {labels}, "examples": "one"}}'}
    save_file(tensors, path, metadata)
    with pytest.raises(FedspanError, match="predictions as fedspan writes them"):
        read_items(tmp_path)
    save_file({name: values.astype(np.float32) for name, values in tensors.items()}, path, metadata)
    with pytest.raises(FedspanError, match="predictions as fedspan writes them"):
        read_items(tmp_path)
