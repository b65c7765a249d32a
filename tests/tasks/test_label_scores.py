"""Scores from counts of labels have the bits of scikit-learn's."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import f1_score, matthews_corrcoef

from fedspan.tasks.label_scores import compute_f1, compute_matthews, count_labels


@pytest.mark.parametrize(("examples", "labels"), [(1, 2), (3, 5), (40, 2), (300, 4), (4000, 60)])
def test_single_labels(examples: int, labels: int) -> None:
    rng = np.random.default_rng(examples)
    targets = rng.integers(0, labels, examples)
    predicted = np.where(rng.random(examples) < 0.5, targets, rng.integers(0, labels, examples))
    true_K, predicted_K, correct_K = count_labels(targets, predicted, labels)
    f1_K = compute_f1(true_K, predicted_K, correct_K)
    expected = f1_score(targets, predicted, labels=range(labels), average=None, zero_division=0)
    assert f1_K.tolist() == np.asarray(expected).tolist()
    if len({*targets, *predicted}) > 1:
        assert compute_matthews(true_K, predicted_K, correct_K) == matthews_corrcoef(targets, predicted)


def test_several_labels_of_an_example() -> None:
    rng = np.random.default_rng(0)
    targets, predicted = rng.random((2, 30, 7)) < 0.3
    counts = targets.sum(0), predicted.sum(0), (targets & predicted).sum(0)
    assert compute_f1(*counts).tolist() == np.asarray(f1_score(targets, predicted, average=None)).tolist()
    micro = compute_f1(*(np.asarray(count.sum()) for count in counts))
    assert float(micro) == f1_score(targets, predicted, average="micro")


@pytest.mark.parametrize("truth", [[1, 1, 1], [0, 1, 2]])
def test_without_different_predictions_the_correlation_is_0(truth: list[int]) -> None:
    assert compute_matthews(*count_labels(np.array(truth), np.array([1, 1, 1]), 3)) == 0.0
