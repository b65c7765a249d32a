"""Shared base of all classifiers, for texts and images: cross-entropy; accuracy, F1 and Matthews correlation.

Local training can adjust the logits to a client's own classes (``compute_class_offsets``): Zhang et al., "Federated
Learning with Label Distribution Skew via Logits Calibration", ICML 2022, arXiv:2209.00189; Menon et al., "Long-tail
learning via logit adjustment", ICLR 2021, arXiv:2007.07314. Shapes: B examples, C clients of a pass, K labels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedspan.tasks.losses import (
    CLASS_OPTIONS,
    OFFSETS,
    average_cross_entropy,
    average_cross_entropy_by_client,
    upcast,
)

__all__ = [
    "SingleLabelClassification",
    "compute_class_offsets",
    "compute_class_weights",
]


def compute_class_weights(labels: np.ndarray, count: int) -> Tensor:
    """Compute scikit-learn's ``balanced`` weights of a client's classes, (K,) float32; 0 of a class without examples.

    Args:
        labels: Labels of the client's own examples, (examples,).
        count: Number of labels K.
    """
    counts = np.bincount(labels, minlength=count)
    weights = len(labels) / (np.count_nonzero(counts) * np.maximum(counts, 1))
    return torch.from_numpy(np.where(counts > 0, weights, 0.0)).float()


def compute_class_offsets(labels: np.ndarray, count: int, strength: float) -> Tensor:
    """Compute the terms that adjust logits to the classes of a client's own examples, (K,) float32.

    The term of a class is ``strength`` times the logarithm of its share of the examples; it is minus infinity for a
    class without examples, which is thereby left out of the softmax and receives no gradient.

    Args:
        labels: Labels of the client's examples, (examples,).
        count: Number of labels K.
        strength: Factor on the logarithm, above 0.
    """
    shares = np.bincount(labels, minlength=count) / len(labels)
    return strength * torch.from_numpy(shares).log().float()


class SingleLabelClassification(ABC):
    """Prediction of one of several labels for an example.

    Args:
        labels: Label names by index.
        metric: Metric by which rounds are compared.
    """

    loss_options = CLASS_OPTIONS
    """Options of ``training`` that the loss takes."""

    def __init__(self, labels: Sequence[str], metric: str = "accuracy") -> None:
        self.labels = tuple(labels)
        self.metric = metric

    @abstractmethod
    def predict(self, model: nn.Module, batch: Mapping[str, Tensor], *, generate: bool = False) -> Tensor:
        """Compute the logits, (examples, labels)."""

    def compute_loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the mean cross-entropy, in float32 or better."""
        return average_cross_entropy(self._compute_training_logits(model, batch), batch["labels"], batch)

    def compute_client_losses(self, model: nn.Module, batch: Mapping[str, Tensor], mask_CB: Tensor) -> Tensor:
        """Compute the mean cross-entropy of each client's examples, (C,)."""
        logits = self._compute_training_logits(model, batch)
        return average_cross_entropy_by_client(logits, batch["labels"], batch, mask_CB)

    def _compute_training_logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the logits, (B, K), with the batch's offsets, if it has any."""
        logits = upcast(self.predict(model, batch))
        return logits + batch[OFFSETS] if OFFSETS in batch else logits

    def compute_metrics(self, predictions: Tensor, examples: Any, indices: Sequence[int]) -> dict[str, float]:
        """Compute ``loss``, ``accuracy``, ``macro_f1`` (over labels that are predicted or true), ``matthews``.

        With two labels also ``f1``, of the second one, as GLUE measures MRPC. The Matthews correlation is 0 if all
        predictions or all labels are the same, as in scikit-learn.
        """
        targets = examples.labels[np.asarray(indices, dtype=np.int64)]
        predicted = predictions.argmax(1).numpy()
        loss = float(F.cross_entropy(predictions.float(), torch.from_numpy(targets)))
        return {"loss": loss, **_score_labels(targets, predicted, binary=len(self.labels) == 2)}

    def decode_predictions(self, predictions: Tensor) -> list[str]:
        """Return the most probable label of each example."""
        return [self.labels[index] for index in predictions.argmax(1).tolist()]

    def decode_targets(self, examples: Any, indices: Sequence[int]) -> list[str]:
        """Return the true label of each example."""
        return [self.labels[index] for index in examples.labels[list(indices)].tolist()]


def _score_labels(targets: np.ndarray, predicted: np.ndarray, *, binary: bool) -> dict[str, float]:
    """Compute ``accuracy``, ``macro_f1``, ``matthews`` and, if ``binary``, ``f1``, with the bits of scikit-learn's.

    Each client is scored in each round, and scikit-learn's functions take 8 ms or more, this one 0.1 ms. The Matthews
    correlation of several labels is Gorodkin's R_K (Computational Biology and Chemistry 28, 2004), as there.

    Args:
        targets: True labels, int64, (B,).
        predicted: Predicted labels, int64, (B,).
        binary: Whether label 1 is the positive one of two.
    """
    labels, codes = np.unique(np.concatenate([targets, predicted]), return_inverse=True)
    true, guessed = np.split(codes, 2)
    hits_K = np.bincount(true[true == guessed], minlength=len(labels)).astype(np.float64)
    true_K = np.bincount(true, minlength=len(labels)).astype(np.float64)
    guessed_K = np.bincount(guessed, minlength=len(labels)).astype(np.float64)
    f1_K = 2 * hits_K / (true_K + guessed_K)
    count = len(targets)
    spread = (count**2 - guessed_K @ guessed_K) * (count**2 - true_K @ true_K)
    covariance = hits_K.sum() * count - true_K @ guessed_K
    scores = {
        "accuracy": float((predicted == targets).mean()),
        "macro_f1": float(f1_K.mean()),
        "matthews": float(covariance / np.sqrt(spread)) if spread else 0.0,
    }
    if binary:
        scores["f1"] = float(f1_K[labels == 1].sum())  # 0 if label 1 is neither true nor predicted
    return scores
