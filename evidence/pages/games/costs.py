"""What protection costs honest nodes: accuracy after the rounds of the head, and seconds of a round in one process."""

from __future__ import annotations

import numpy as np

from evidence.pages.games.heads import Heads, compute_accuracy, train_head


def play_costs(heads: Heads, nodes: int, examples: int, seed: int, tested: int = 3000) -> dict[str, float]:
    """Return the accuracy on other examples, and the seconds of a round.

    Args:
        heads: The run.
        nodes: Number of nodes.
        examples: Examples of a node.
        seed: Seed of the examples.
        tested: Examples on which the accuracy is measured.
    """
    order = np.random.default_rng(seed).permutation(len(heads.labels))
    parts = np.split(order[: nodes * examples], nodes)
    logits, seconds = train_head(heads, parts, seed)
    return {"accuracy": compute_accuracy(heads, logits, order[-tested:]), "seconds": seconds}
