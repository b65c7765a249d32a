"""Scores of target tokens and generated ids, against plain loops."""

from __future__ import annotations

import math

import pytest
import torch

from fedspan.tasks.token_scores import SCORES, compute_token_metrics, mark_ends, score_tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_are_sums_over_each_example_s_tokens(dtype: torch.dtype) -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
    targets, numbers = torch.tensor([3, 0, 6, 6, 2]), torch.tensor([0, 2, 2, 0, 0])
    scores = score_tokens(logits, targets, numbers, 3)
    assert scores.shape == (3, SCORES)
    for example in range(3):
        tokens = [at for at in range(5) if int(numbers[at]) == example]
        losses = [-float(logits[at].log_softmax(0)[targets[at]]) for at in tokens]
        right = sum(int(logits[at].argmax()) == int(targets[at]) for at in tokens)
        assert scores[example].tolist() == pytest.approx([sum(losses), len(tokens), right], rel=1e-5)
    metrics = compute_token_metrics(scores)
    assert metrics["loss"] == pytest.approx(float(scores[:, 0].sum()) / 5, rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))
    assert metrics["token_accuracy"] == pytest.approx(float(scores[:, 2].sum()) / 5)


def test_the_perplexity_of_a_diverged_model_is_finite() -> None:
    assert math.isfinite(compute_token_metrics(torch.tensor([[1e6, 2.0, 0.0]]))["perplexity"])


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        (2, [[5, -1, -1, -1], [7, 8, 9, -1]]),
        ([2, 8], [[5, -1, -1, -1], [7, -1, -1, -1]]),
        (None, [[5, 2, 4, -1], [7, 8, 9, -1]]),
    ],
)
def test_ids_end_at_the_first_end(ends: int | list[int] | None, expected: list[list[int]]) -> None:
    assert mark_ends(torch.tensor([[5, 2, 4], [7, 8, 9]]), 4, ends).tolist() == expected
