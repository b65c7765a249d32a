"""F1 and Matthews correlation of labels have scikit-learn's bits."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from sklearn.metrics import f1_score, matthews_corrcoef

from fedspan.tasks.label_scores import compute_f1, compute_matthews


def count(truth: np.ndarray, guess: np.ndarray, labels: int) -> list[np.ndarray]:
    return [np.bincount(numbers, minlength=labels) for numbers in (truth[guess == truth], guess, truth)]


@pytest.mark.parametrize("labels", [2, 3, 11])
@pytest.mark.parametrize("examples", [1, 2, 7, 60, 3000])
def test_scores_have_the_bits_of_scikit_learns(examples: int, labels: int) -> None:
    rng = np.random.default_rng(5)
    for _ in range(10):
        truth = rng.integers(0, labels, examples)
        guess = np.where(rng.random(examples) < 0.4, truth, rng.integers(0, labels, examples))
        counts = count(truth, guess, labels)
        every = list(range(labels))
        expected = f1_score(truth, guess, average=None, labels=every, zero_division=0)  # pyright: ignore
        assert compute_f1(*counts).tolist() == expected.tolist()  # pyright: ignore[reportAttributeAccessIssue]
        with warnings.catch_warnings(action="ignore"):  # scikit-learn warns of a single label
            assert compute_matthews(*counts) == matthews_corrcoef(truth, guess)


def test_equal_labels_have_no_correlation() -> None:
    same, other = np.array([1, 1, 1]), np.array([0, 1, 1])
    for truth, guess in ((same, same), (same, other), (other, same)):
        assert compute_matthews(*count(truth, guess, 2)) == 0.0
    assert compute_matthews(*count(other, other, 2)) == 1.0
    assert compute_matthews(*count(other, 1 - other, 2)) == -1.0
    assert compute_f1(*count(same, same, 3)).tolist() == [0.0, 1.0, 0.0]
