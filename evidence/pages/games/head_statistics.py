"""Candidates from the exact statistics of a head, which an owner may let leave a node once (off by default).

Sums of features by label and second moments are compared with those of public texts: a member moves both towards
its own features (Homer et al., PLoS Genetics 2008). Labels and their counts are in the statistics as they are.
"""

from __future__ import annotations

import numpy as np
import torch

from evidence.pages.games.harness import Rows, compute_rate, prepare_nodes
from fedspan.clients.statistics import compute_client_statistics
from fedspan.config.node import NodeLimits
from fedspan.core.heads import HeadStatistics
from fedspan.tasks.task import get_labels


def play_statistics(rows: Rows, examples: int, candidates: int, seed: int) -> float:
    """Return the share of members found at 1 % false ones, above 1 %.

    Args:
        rows: Texts and labels: the node's, and public ones.
        examples: Examples of the node.
        candidates: Candidates on each side; those that are not the node's are not among the attacker's public texts.
        seed: Seed of the run.
    """
    limits = NodeLimits()
    node = prepare_nodes({"model": {"max_length": limits.statistics_max_length}}, rows, len(rows), "plain", seed)
    everything = np.arange(len(rows))
    own, public = everything[:examples], everything[examples + candidates :]
    features = node.engine.compute_features(None, node.train, everything, 64).double()
    if examples < limits.statistics_examples * features.shape[1]:
        raise ValueError(f"the node's file lets no statistics of {examples} examples leave it")
    labels = torch.from_numpy(get_labels(node.train, everything))
    sent, known = (
        HeadStatistics.from_tensors(
            compute_client_statistics(node.engine, None, node.train, part, "lda", 0.0, limits.class_examples)
        ).normalize("lda")
        for part in (own, public)
    )
    assert sent.products is not None
    assert known.products is not None
    inverse = torch.linalg.inv(known.products)
    tested = torch.cat([features[:candidates], features[examples : examples + candidates]])
    tested_labels = torch.cat([labels[:candidates], labels[examples : examples + candidates]])
    means = [part.sums / part.shares.clamp(min=1e-9)[:, None] for part in (sent, known)]
    along = tested @ inverse
    by_label = (along * (means[0] - means[1])[tested_labels]).sum(1)
    by_moment = ((along @ (sent.products - known.products)) * along).sum(1)
    scores = sum((part - part.mean()) / part.std() for part in (by_label, by_moment))
    assert isinstance(scores, torch.Tensor)
    return compute_rate(scores[:candidates].numpy(), scores[candidates:].numpy()) - 0.01
