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

from fedspan.tasks.label_scores import compute_f1, compute_matthews, count_labels
from fedspan.tasks.losses import (
    CLASS_OPTIONS,
    OFFSETS,
    average_cross_entropy,
    average_cross_entropy_by_client,
    compute_guess_bound,
    upcast,
)


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
    """Prediction of one of several labels for an example."""

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
        true_K, predicted_K, correct_K = count_labels(targets, predicted, len(self.labels))
        f1_K = compute_f1(true_K, predicted_K, correct_K)
        scores = {
            "loss": float(F.cross_entropy(predictions.float(), torch.from_numpy(targets))),
            "accuracy": float((predicted == targets).mean()),
            "macro_f1": float(f1_K[true_K + predicted_K > 0].mean()),
            "matthews": compute_matthews(true_K, predicted_K, correct_K),
        }
        if len(self.labels) == 2:
            scores["f1"] = float(f1_K[1])
        return scores

    @property
    def loss_bound(self) -> float:
        """Largest loss of an example that an owner reports to others."""
        return compute_guess_bound(len(self.labels))

    def compute_example_losses(
        self, predictions: Tensor, examples: Any, indices: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """``BoundsExamples.compute_example_losses``: the cross-entropies, with equal weights."""
        targets_B = torch.from_numpy(examples.labels[np.asarray(indices, dtype=np.int64)])
        losses_B = F.cross_entropy(predictions.float(), targets_B, reduction="none")
        return losses_B, torch.ones_like(losses_B)

    def decode_predictions(self, predictions: Tensor) -> list[str]:
        """Return the most probable label of each example."""
        return [self.labels[index] for index in predictions.argmax(1).tolist()]

    def decode_targets(self, examples: Any, indices: Sequence[int]) -> list[str]:
        """Return the true label of each example."""
        return [self.labels[index] for index in examples.labels[list(indices)].tolist()]
