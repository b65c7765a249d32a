"""What protection costs honest nodes: accuracy after the rounds of the head, and processor seconds of one of them."""

from collections.abc import Callable

import numpy as np

from evidence.pages.games.heads import HEAD_PROTECTIONS, Heads, compute_accuracy, train_head, train_many

TIMED = 200
"""Largest number of examples of a node with which rounds are timed: the seconds grow with it."""


def play_costs(
    build: Callable[[], Heads], protection: str, nodes: int, examples: int, seed: int, tested: int = 3000
) -> dict[str, float]:
    """Return the accuracy on other examples, and the seconds of all nodes and the server a round.

    Args:
        build: Returns the run.
        protection: Its protection.
        nodes: Number of nodes.
        examples: Examples of a node.
        seed: Seed of the examples.
        tested: Examples on which the accuracy is measured.
    """
    heads = build()
    order = np.random.default_rng(seed).permutation(len(heads.labels))
    parts = np.split(order[: nodes * examples], nodes)
    (logits,) = train_many(heads, [parts], seed)
    costs = {"accuracy": compute_accuracy(heads, logits, order[-tested:])}
    if protection in HEAD_PROTECTIONS and examples <= TIMED:
        costs["seconds"] = train_head(heads, parts, seed, rounds=1)[1]
    return costs
