"""Losses of embeddings: equal to sentence-transformers' on the same vectors, and blind to other clients' examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedspan.tasks.embedding_losses import (
    compute_contrastive,
    compute_cosent,
    compute_cosine_error,
    compute_multiple_negatives,
)

LOSSES = pytest.importorskip("sentence_transformers.losses", reason="needs fedspan[sentence-transformers]")
EXAMPLES, FEATURES = 9, 5
OWNERS = ([0, 3, 4], [7], [1, 2, 5, 8])
"""Examples of each client; the one at 6 belongs to none."""


def draw_vectors() -> list[Tensor]:
    rng = torch.Generator().manual_seed(2)
    return [torch.randn(EXAMPLES, FEATURES, generator=rng) for _ in range(3)]


SCORES = torch.tensor([0.1, 0.9, 0.4, 0.4, 1.0, 0.0, 0.6, 0.3, 0.4])
LABELS = (SCORES > 0.35).float()
Ours = Callable[[list[Tensor], Tensor], Tensor]
CASES: dict[str, tuple[Callable[[], Any], Ours, Tensor | None]] = {
    "pairs": (
        lambda: LOSSES.MultipleNegativesRankingLoss(None),
        lambda vectors, mask: compute_multiple_negatives(vectors[0], vectors[1:2], mask, 20.0),
        None,
    ),
    "triplets": (
        lambda: LOSSES.MultipleNegativesRankingLoss(None, scale=7.0),
        lambda vectors, mask: compute_multiple_negatives(vectors[0], vectors[1:], mask, 7.0),
        None,
    ),
    "cosent": (
        lambda: LOSSES.CoSENTLoss(None),
        lambda vectors, mask: compute_cosent(F.cosine_similarity(*vectors[:2]), SCORES, mask, 20.0),
        SCORES,
    ),
    "cosine": (
        lambda: LOSSES.CosineSimilarityLoss(None),
        lambda vectors, mask: compute_cosine_error(F.cosine_similarity(*vectors[:2]), SCORES, mask),
        SCORES,
    ),
    "contrastive": (
        lambda: LOSSES.ContrastiveLoss(None, margin=0.7),
        lambda vectors, mask: compute_contrastive(F.cosine_similarity(*vectors[:2]), LABELS, mask, 0.7),
        LABELS,
    ),
}


def mask_of(*owners: list[int]) -> Tensor:
    mask_CB = torch.zeros(len(owners), EXAMPLES)
    for client, own in enumerate(owners):
        mask_CB[client, own] = 1
    return mask_CB


@pytest.mark.parametrize("name", CASES)
def test_each_clients_loss_and_gradient_are_the_librarys_on_its_own_vectors(name: str) -> None:
    make, compute, targets = CASES[name]
    vectors = [vectors.requires_grad_() for vectors in draw_vectors()]
    count = 3 if name == "triplets" else 2
    losses_C = compute(vectors, mask_of(*OWNERS))
    ours = torch.autograd.grad(losses_C.sum(), vectors[:count])
    expected = [
        make().compute_loss_from_embeddings(
            [one[own] for one in vectors[:count]], None if targets is None else targets[own]
        )
        for own in OWNERS
    ]
    torch.testing.assert_close(losses_C, torch.stack(expected), rtol=1e-5, atol=1e-6)
    theirs = torch.autograd.grad(torch.stack(expected).sum(), vectors[:count])
    for gradient, own in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, own, rtol=1e-4, atol=1e-6)
    assert not ours[0][6].any()  # the example of no client


@pytest.mark.parametrize("name", CASES)
def test_other_clients_vectors_change_nothing(name: str) -> None:
    compute, vectors = CASES[name][1], draw_vectors()
    before = compute(vectors, mask_of(*OWNERS))
    changed = [one.clone() for one in vectors]
    for one in changed:
        one[OWNERS[2]] += 1
    after = compute(changed, mask_of(*OWNERS))
    torch.testing.assert_close(after[:2], before[:2], rtol=0, atol=0)
    assert float(after[2]) != float(before[2])
