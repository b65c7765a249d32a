"""Losses of text embeddings, equal to those of sentence-transformers, each for several clients that share a batch.

Shapes: B examples, C clients, H features, D documents (B positives, then B negatives if there are any). Vectors need
not be normalized: all losses use their cosines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedspan.tasks.losses import average_by_client

EmbeddingLoss = Literal["multiple-negatives", "cosent", "cosine-similarity", "contrastive"]
_FAR = 1e12
"""Subtracted from a logit that does not count; its exponential is zero."""


def compute_multiple_negatives(
    anchors_BH: Tensor, documents: Sequence[Tensor], mask_CB: Tensor, scale: float
) -> Tensor:
    """Compute the multiple-negatives ranking loss of each client, (C,).

    The loss of an example is the cross-entropy of its positive among the positives and negatives of the client's own
    examples in the batch; those of other clients do not enter. It is 0 for the only example of a client without a
    negative. sentence-transformers: ``MultipleNegativesRankingLoss``.

    Args:
        anchors_BH: Vectors of the anchors.
        documents: Vectors of the positives, (B, H), and of the negatives if there are any, (B, H).
        mask_CB: 1 where an example belongs to a client, else 0.
        scale: Factor of the cosines, the inverse of a temperature.
    """
    documents_DH = F.normalize(torch.cat(list(documents)), dim=1)
    logits_BD = scale * F.normalize(anchors_BH, dim=1) @ documents_DH.T
    places_B = torch.arange(len(anchors_BH), device=anchors_BH.device)
    # An example of no client counts with itself alone: its loss is unused, and has to be finite.
    is_own_BB = _find_shared(mask_CB) | (places_B == places_B[:, None])
    logits_BD = logits_BD.masked_fill(~is_own_BB.repeat(1, len(documents)), -torch.inf)
    return average_by_client(F.cross_entropy(logits_BD, places_B, reduction="none"), mask_CB)


def compute_cosent(cosines_B: Tensor, scores_B: Tensor, mask_CB: Tensor, scale: float) -> Tensor:
    """Compute the CoSENT loss of each client, (C,).

    It is ``log(1 + sum exp(scale * (cos_i - cos_j)))`` over all pairs of the client's own examples in the batch with
    ``score_i < score_j``. sentence-transformers: ``CoSENTLoss``.

    Args:
        cosines_B: Cosine of each pair of texts.
        scores_B: Score of each pair; only the order counts.
        mask_CB: 1 where an example belongs to a client, else 0.
        scale: Factor of the cosines.
    """
    is_lower_BB = (scores_B[:, None] < scores_B) & _find_shared(mask_CB)
    terms_BB = scale * (cosines_B[:, None] - cosines_B)
    rows_B = terms_BB.masked_fill(~is_lower_BB, -_FAR).logsumexp(1)
    rows_CB = rows_B.expand_as(mask_CB).masked_fill(mask_CB == 0, -_FAR)
    return torch.cat([rows_CB.new_zeros(len(rows_CB), 1), rows_CB], 1).logsumexp(1)


def compute_cosine_error(cosines_B: Tensor, scores_B: Tensor, mask_CB: Tensor) -> Tensor:
    """Compute the mean squared difference of cosines and scores of each client, (C,).

    sentence-transformers: ``CosineSimilarityLoss``.

    Args:
        cosines_B: Cosine of each pair of texts.
        scores_B: Score of each pair, from -1 to 1.
        mask_CB: 1 where an example belongs to a client, else 0.
    """
    return average_by_client((cosines_B - scores_B).square(), mask_CB)


def compute_contrastive(cosines_B: Tensor, labels_B: Tensor, mask_CB: Tensor, margin: float) -> Tensor:
    """Compute the contrastive loss of each client, (C,).

    With the distance ``d = 1 - cos`` it is the mean of ``d^2 / 2`` of similar pairs, and of
    ``max(0, margin - d)^2 / 2`` of others. sentence-transformers: ``ContrastiveLoss``; Hadsell et al. 2006.

    Args:
        cosines_B: Cosine of each pair of texts.
        labels_B: 1 for a similar pair, else 0.
        mask_CB: 1 where an example belongs to a client, else 0.
        margin: Distance beyond which a pair of label 0 has no loss.
    """
    distances_B = 1 - cosines_B
    values_B = labels_B * distances_B.square() + (1 - labels_B) * F.relu(margin - distances_B).square()
    return average_by_client(0.5 * values_B, mask_CB)


def _find_shared(mask_CB: Tensor) -> Tensor:
    """Return which examples belong to the same client, (B, B)."""
    return mask_CB.T @ mask_CB > 0
