"""What protection costs honest nodes: accuracy after the rounds of the head."""

from __future__ import annotations

import numpy as np

from evidence.pages.games.heads import Heads, compute_accuracy, train_many


def play_costs(heads: Heads, nodes: int, examples: int, seed: int, tested: int = 3000) -> dict[str, float]:
    """Return the accuracy of the head on other examples.

    Args:
        heads: The run.
        nodes: Number of nodes.
        examples: Examples of a node.
        seed: Seed of the examples.
        tested: Examples on which the accuracy is measured.
    """
    order = np.random.default_rng(seed).permutation(len(heads.labels))
    (logits,) = train_many(heads, [np.split(order[: nodes * examples], nodes)], seed)
    return {"accuracy": compute_accuracy(heads, logits, order[-tested:])}
