"""Shared parts of tasks with a target for each token: the loss, scores of target tokens, and generated ids.

Shapes: B examples, T tokens, S target tokens of a batch, V vocabulary or classes, C clients, N generated ids.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedspan.core.tensors import sum_rows
from fedspan.tasks.losses import (
    LossOption,
    average_cross_entropy,
    average_cross_entropy_by_client,
    average_sums,
    compute_guess_entropy,
    upcast,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
"""The label of tokens that are no targets, as in Transformers."""
TARGET_COUNTS = "target_tokens"
"""Key of a batch's numbers of target tokens by example, (B,), on the CPU: they are shapes, which the host must know."""
SCORES = 3
"""Number of columns of a prediction before the generated ids: sum of losses, target tokens, correct tokens."""
_LARGEST = 700.0
"""The exponential of a larger loss overflows a float64."""


class TokenTask(ABC):
    """A task whose loss is the mean cross-entropy of the target tokens of all examples together."""

    loss_options: tuple[LossOption, ...] = ("label_smoothing",)
    """Options of ``training`` that the loss takes."""
    continuous_columns = 2
    """Number of leading columns of a prediction that rounding changes only slightly: sum of losses, number of tokens.

    The others depend on which score is the largest. Rounding decides that where two are nearly equal, so a check that
    two passes of the model give the same predictions compares only these columns.
    """

    @abstractmethod
    def compute_logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logits (S, V) of a batch's target tokens, their targets, and their examples' numbers, (S,)."""

    def compute_loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the mean negative log-likelihood of the batch's targets, in float32 or better.

        With the batch's share of smoothing, if there is one, as Transformers' ``LabelSmoother``.
        """
        logits_SV, targets_S, rows_S = self.compute_logits(model, batch)
        return average_cross_entropy(logits_SV, targets_S, batch, rows_S)

    def compute_client_losses(self, model: nn.Module, batch: Mapping[str, Tensor], mask_CB: Tensor) -> Tensor:
        """Compute the mean negative log-likelihood of the targets of each client's examples, (C,)."""
        logits_SV, targets_S, rows_S = self.compute_logits(model, batch)
        return average_cross_entropy_by_client(logits_SV, targets_S, batch, mask_CB, rows_S)

    def compute_example_losses(
        self, predictions: Tensor, examples: Any, indices: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """``BoundsExamples.compute_example_losses``: the mean over an example's targets, and their number."""
        return average_sums(predictions)


class VocabularyTask(TokenTask):
    """A task whose targets are tokens of the model's vocabulary."""

    tokenizer: PreTrainedTokenizerBase

    @property
    def guess_loss(self) -> float:
        """Loss of a uniform guess among the vocabulary's tokens."""
        return compute_guess_entropy(len(self.tokenizer))

    def decode_predictions(self, predictions: Tensor) -> list[str]:
        """Return the texts of the generated ids behind the scores of predictions."""
        rows = [[int(id) for id in row if id >= 0] for row in predictions[:, SCORES:].tolist()]
        return [str(text).strip() for text in self.tokenizer.batch_decode(rows, skip_special_tokens=True)]


def select_targets(logits_BTV: Tensor, labels_BT: Tensor, counts_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits (S, V) of a batch's target tokens, their labels, and their examples' numbers, (S,).

    Args:
        logits_BTV: Logits of all tokens.
        labels_BT: Labels of all tokens, ``IGNORED`` of those that are no targets.
        counts_B: Number of targets by example, on the CPU.
    """
    places_S = find_targets(labels_BT != IGNORED, counts_B)
    logits_SV = upcast(logits_BTV.flatten(0, 1).index_select(0, places_S))
    return logits_SV, labels_BT.flatten()[places_S], places_S // labels_BT.shape[1]


def find_targets(is_target_BT: Tensor, counts_B: Tensor) -> Tensor:
    """Return the positions of a batch's target tokens in its flattened tokens, int64, (S,).

    A mask as index would make the host wait for a GPU, which alone knows how many tokens it selects.

    Args:
        is_target_BT: Whether a token is a target.
        counts_B: Number of targets by example, on the CPU.
    """
    return torch.nonzero_static(is_target_BT.flatten(), size=int(counts_B.sum()))[:, 0]


def score_tokens(logits_SV: Tensor, targets_S: Tensor, numbers_S: Tensor, count: int) -> Tensor:
    """Sum up target tokens by example.

    Returns:
        Sum of negative log-likelihood, number of target tokens and number of correct ones of each example, (B, 3).
    """
    losses_S = F.cross_entropy(logits_SV, targets_S, reduction="none").float()
    correct_S = (logits_SV.argmax(1) == targets_S).float()
    return sum_rows(torch.stack([losses_S, torch.ones_like(losses_S), correct_S], 1), numbers_S, count)


def compute_token_metrics(predictions: Tensor) -> dict[str, float]:
    """Compute ``loss`` (mean over target tokens), ``perplexity`` and ``token_accuracy`` from rows of scores."""
    loss, tokens, correct = predictions[:, :SCORES].double().sum(0).tolist()
    return {
        "loss": loss / tokens,
        "perplexity": math.exp(min(loss / tokens, _LARGEST)),
        "token_accuracy": correct / tokens,
    }


def mark_ends(generated_BN: Tensor, length: int, ends: int | Sequence[int] | None) -> Tensor:
    """Return generated ids as float32, (B, length), with -1 from their first end on and where none was generated."""
    rows = torch.full((len(generated_BN), length), -1.0, device=generated_BN.device)
    rows[:, : generated_BN.shape[1]] = generated_BN.float()
    stops = torch.tensor([ends] if isinstance(ends, int) else list(ends or ()), device=generated_BN.device)
    rows[:, : generated_BN.shape[1]][torch.isin(generated_BN, stops).cumsum(1) > 0] = -1.0
    return rows
