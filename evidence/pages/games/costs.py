"""What protection costs honest nodes: accuracy after the rounds of the head, and seconds of a round in one process."""

from __future__ import annotations

import numpy as np

from evidence.pages.games.heads import Heads, compute_accuracy, train_head, train_many


def draw_parts(heads: Heads, nodes: int, examples: int, seed: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Draw the examples of nodes, and 3,000 others."""
    order = np.random.default_rng(seed).permutation(len(heads.labels))
    return np.split(order[: nodes * examples], nodes), order[-3000:]


def play_costs(heads: Heads, nodes: int, examples: int, seed: int) -> dict[str, float]:
    """Return the accuracy of the heads of ``train_many`` on other examples."""
    parts, others = draw_parts(heads, nodes, examples, seed)
    return {"accuracy": compute_accuracy(heads, train_many(heads, [parts], seed)[0], others)}


def time_round(heads: Heads, nodes: int, examples: int, seed: int) -> dict[str, float]:
    """Return the processor's seconds of one round of a federation, all nodes together."""
    return {"seconds": train_head(heads, draw_parts(heads, nodes, examples, seed)[0], seed, rounds=1)[1]}
