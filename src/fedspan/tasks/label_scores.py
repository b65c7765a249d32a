"""F1 and Matthews correlation from counts of labels, with scikit-learn's conventions and results.

scikit-learn's functions check and encode their arguments for about 10 ms, more than the predictions of a small client
take, and every evaluation calls them for each client. Shapes: K labels.
"""

from __future__ import annotations

import numpy as np

LABEL_METRICS = ("accuracy", "macro_f1", "f1", "matthews")
"""Metrics of ``score_labels``."""


def count_labels(targets: np.ndarray, predicted: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Count for each label how often it is true, predicted, and both, (K,) float64 each.

    Args:
        targets: True labels, (examples,) integers.
        predicted: Predicted labels, (examples,) integers.
        count: Number of labels K.
    """
    true_K, predicted_K, correct_K = (
        np.bincount(labels, minlength=count).astype(np.float64)
        for labels in (targets, predicted, targets[targets == predicted])
    )
    return true_K, predicted_K, correct_K


def compute_f1(true: np.ndarray, predicted: np.ndarray, correct: np.ndarray) -> np.ndarray:
    """Compute the F1 of each count; 0 where a label is neither true nor predicted.

    Args:
        true: How often a label is true, any shape.
        predicted: How often it is predicted, the same shape.
        correct: How often it is both, the same shape.
    """
    return 2 * correct / np.maximum(true + predicted, 1)


def compute_matthews(true_K: np.ndarray, predicted_K: np.ndarray, correct_K: np.ndarray) -> float:
    """Compute the Matthews correlation of one label for each example; 0 if all are predicted, or true, alike.

    Args:
        true_K: How often each label is true, (K,) float64.
        predicted_K: How often each label is predicted, (K,) float64.
        correct_K: How often each label is both, (K,) float64.
    """
    squared = true_K.sum() ** 2
    covariance = correct_K.sum() * true_K.sum() - true_K @ predicted_K
    variances = (squared - predicted_K @ predicted_K) * (squared - true_K @ true_K)
    return float(covariance / np.sqrt(variances)) if variances > 0 else 0.0


def score_labels(metric: str, targets: np.ndarray, predicted: np.ndarray) -> float:
    """Compute one of ``LABEL_METRICS`` of one label for each example; ``f1`` is that of the second of two labels."""
    if metric == "accuracy":
        return float((targets == predicted).mean())
    true_K, predicted_K, correct_K = count_labels(targets, predicted, int(max(targets.max(), predicted.max(), 1)) + 1)
    if metric == "matthews":
        return compute_matthews(true_K, predicted_K, correct_K)
    f1_K = compute_f1(true_K, predicted_K, correct_K)
    return float(f1_K[1] if metric == "f1" else f1_K[true_K + predicted_K > 0].mean())
