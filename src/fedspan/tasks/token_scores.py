"""What tasks whose targets are texts have in common: scores of target tokens, and generated ids behind them.

Shapes: B examples, S target tokens of a batch, V vocabulary, N generated ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from fedspan.core.tensors import sum_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
"""The label of tokens that are no targets, as in Transformers."""
SCORES = 3
"""Number of columns of a prediction before the generated ids: sum of losses, target tokens, correct tokens."""
_LARGEST = 700.0
"""The exponential of a larger loss overflows a float64."""


def score_tokens(logits_SV: Tensor, targets_S: Tensor, numbers_S: Tensor, count: int) -> Tensor:
    """Sum up target tokens by example.

    Args:
        logits_SV: Logits of the target tokens.
        targets_S: The target tokens.
        numbers_S: Number of the example of each token.
        count: Number B of examples.

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


def decode_generated(tokenizer: PreTrainedTokenizerBase, predictions: Tensor) -> list[str]:
    """Return the texts of the ids behind the scores of predictions."""
    rows = [[int(id) for id in row if id >= 0] for row in predictions[:, SCORES:].tolist()]
    return [str(text).strip() for text in tokenizer.batch_decode(rows, skip_special_tokens=True)]
