"""Candidates from the exact statistics of a head, which an owner may let leave a node once (off by default).

Sums of features by label and second moments are compared with those of public texts: a member moves both towards
its own features (Homer et al., PLoS Genetics 2008). Labels and their counts are in the statistics as they are.
"""

import numpy as np
import torch
from torch import Tensor

from evidence.pages.games.harness import compute_rate
from evidence.pages.games.heads import Heads
from fedspan.config.node import NodeLimits
from fedspan.core.heads import summarize_features


def play_statistics(heads: Heads, examples: int, candidates: int, seed: int) -> dict[str, float]:
    """Return the share of members found at 1 % false ones, above 1 %.

    Args:
        heads: A run with features and labels.
        examples: Examples of the node; the others are public, but for candidates.
        candidates: Candidates on each side; those that are not the node's are not among the attacker's public texts.
        seed: Seed of the node's examples.
    """
    features, labels, limits = heads.features, heads.labels, NodeLimits()
    order = np.random.default_rng(seed).permutation(len(labels))
    assert examples >= limits.statistics_examples * features.shape[1], "a node with default limits sends none"
    own, public = order[:examples], order[examples + candidates :]
    classes = int(labels.max()) + 1
    is_sent = (torch.bincount(labels[own], minlength=classes) >= limits.class_examples)[labels[own]].numpy()
    sent, known = (summarize_features(features[part], labels[part], classes, "lda") for part in (own[is_sent], public))
    assert sent.products is not None
    assert known.products is not None
    tested = np.concatenate([own[:candidates], order[examples : examples + candidates]])
    along = features[tested] @ torch.linalg.inv(known.products)
    means = [part.sums / part.shares.clamp(min=1e-9)[:, None] for part in (sent, known)]
    by_label = (along * (means[0] - means[1])[labels[tested]]).sum(1)
    by_moment = ((along @ (sent.products - known.products)) * along).sum(1)
    scores = sum((part - part.mean()) / part.std() for part in (by_label, by_moment))
    assert isinstance(scores, Tensor)
    return {"candidates": compute_rate(scores[:candidates].numpy(), scores[candidates:].numpy()) - 0.01}
