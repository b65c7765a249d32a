"""Recall and nDCG of retrieval: equal to scikit-learn's, and zero for a model without differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import ndcg_score
from sklearn.metrics.pairwise import cosine_similarity

from fedspan.tasks.retrieval import measure_retrieval


def test_recall_and_ndcg_of_documents_are_scikit_learns() -> None:
    texts = torch.randn(60, 6, generator=torch.Generator().manual_seed(3))
    draw = np.random.default_rng(4)
    anchors, positives = draw.integers(0, 20, 45), draw.integers(20, 60, 45)  # several positives of one anchor
    recall, ndcg = measure_retrieval(texts[anchors], texts[positives], anchors, positives, 10)
    queries, documents = np.unique(anchors), np.unique(positives)
    pairs = {*zip(anchors.tolist(), positives.tolist(), strict=True)}
    relevant = np.array([[(query, document) in pairs for document in documents] for query in queries])
    similarities = cosine_similarity(texts[torch.from_numpy(queries)], texts[torch.from_numpy(documents)])
    first = [set(np.argsort(-row)[:10].tolist()) for row in similarities]
    shares = [
        len(found & {*np.flatnonzero(row).tolist()}) / row.sum() for found, row in zip(first, relevant, strict=True)
    ]
    assert recall == pytest.approx(np.mean(shares))
    assert ndcg == pytest.approx(ndcg_score(relevant, similarities, k=10))
    assert 0 < ndcg < 1


def test_equal_vectors_find_no_documents() -> None:
    vectors, numbers = torch.ones(30, 4), np.arange(30)
    assert measure_retrieval(vectors, vectors, numbers, numbers) == (0.0, 0.0)
    broken = torch.full((30, 4), float("nan"))
    assert measure_retrieval(broken, broken, numbers, numbers) == (0.0, 0.0)


def test_equal_positives_are_one_of_the_documents() -> None:
    vectors = torch.eye(3)
    anchors, positives = np.array([7, 7, 8]), np.array([0, 1, 1])
    recall, ndcg = measure_retrieval(vectors[[0, 0, 1]], vectors[[0, 1, 1]], anchors, positives, 1)
    assert recall == pytest.approx((1 / 2 + 1) / 2)
    assert ndcg == 1.0
