"""F1 and Matthews correlation from the counts of each label, with the bits of scikit-learn.

scikit-learn's own functions check and sort their input anew for each score, which takes milliseconds for each client,
and their import takes a second. Shapes: K labels.
"""

from __future__ import annotations

import numpy as np

__all__ = [
    "compute_f1",
    "compute_matthews",
]


def compute_f1(correct_K: np.ndarray, predicted_K: np.ndarray, true_K: np.ndarray) -> np.ndarray:
    """Compute F1 of each label, (K,); 0 of a label that is neither predicted nor true.

    Args:
        correct_K: Numbers of examples for which a label is predicted and true.
        predicted_K: Numbers of examples for which it is predicted.
        true_K: Numbers of examples for which it is true.
    """
    return 2.0 * correct_K / np.maximum(predicted_K + true_K, 1)


def compute_matthews(correct_K: np.ndarray, predicted_K: np.ndarray, true_K: np.ndarray) -> float:
    """Compute the Matthews correlation of examples with one label each; 0 if all labels of either side are the same.

    Gorodkin, "Comparing two K-category assignments by a K-category correlation coefficient", Computational Biology and
    Chemistry 28 (2004).

    Args:
        correct_K: Numbers of examples for which a label is predicted and true.
        predicted_K: Numbers of examples for which it is predicted.
        true_K: Numbers of examples for which it is true.
    """
    predicted, true = predicted_K.astype(np.float64), true_K.astype(np.float64)
    examples = true.sum()
    variances = (examples**2 - predicted @ predicted) * (examples**2 - true @ true)
    if variances == 0:
        return 0.0
    return float((correct_K.sum() * examples - true @ predicted) / np.sqrt(variances))
