"""Metrics of retrieval: the positives of each anchor among all positives of a data set, ranked by cosine similarity.

Shapes: N pairs, H features, Q distinct anchors, D distinct positives, R distinct pairs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

_CHUNK = 1024
"""Number of pairs whose similarities to all documents are in memory at once."""


def measure_retrieval(
    anchors_NH: Tensor, positives_NH: Tensor, anchor_ids: np.ndarray, positive_ids: np.ndarray, k: int = 10
) -> tuple[float, float]:
    """Compute recall and nDCG of the first ``k`` documents, as means over distinct anchors.

    The documents are the distinct positives; every positive of an anchor is relevant. Of documents with equal
    similarities, the relevant ones count as the last, so that a model with one vector for all texts finds nothing.

    Args:
        anchors_NH: Vectors of the anchors.
        positives_NH: Vectors of the positives.
        anchor_ids: Number of each anchor's text, (N,); equal texts have equal numbers.
        positive_ids: Number of each positive's text, (N,).
        k: Number of documents.

    Returns:
        Recall and nDCG.
    """
    _, first_Q, queries_N = np.unique(anchor_ids, return_index=True, return_inverse=True)
    _, first_D, documents_N = np.unique(positive_ids, return_index=True, return_inverse=True)
    anchors_QH = F.normalize(anchors_NH[torch.from_numpy(first_Q)].float(), dim=1)
    documents_DH = F.normalize(positives_NH[torch.from_numpy(first_D)].float(), dim=1)
    pairs_R2 = np.unique(np.stack([queries_N, documents_N], 1), axis=0)
    ranks: list[Tensor] = []
    for start in range(0, len(pairs_R2), _CHUNK):
        queries_R, documents_R = torch.from_numpy(pairs_R2[start : start + _CHUNK]).T
        similarities_RD = anchors_QH[queries_R] @ documents_DH.T
        own_R = similarities_RD.gather(1, documents_R[:, None])
        ranks.append((similarities_RD >= own_R).sum(1))
    ranks_R = torch.cat(ranks).numpy()
    is_hit_R = (ranks_R >= 1) & (ranks_R <= k)  # a similarity that is not a number has rank 0
    queries_R = pairs_R2[:, 0]
    relevant_Q = np.bincount(queries_R)
    hits_Q = np.bincount(queries_R, is_hit_R)
    gains_Q = np.bincount(queries_R, is_hit_R / np.log2(np.maximum(ranks_R, 1) + 1))
    ideal = np.cumsum(1 / np.log2(np.arange(k) + 2))
    return float((hits_Q / relevant_Q).mean()), float((gains_Q / ideal[np.minimum(relevant_Q, k) - 1]).mean())
