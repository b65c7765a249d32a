"""Means of reported metrics that no client alone can move far, by which rounds are compared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

DECIDING = 3
"""Number of clients that report their own metrics from which these metrics decide between rounds."""


def describe_few_nodes(count: int) -> str | None:
    """Return a note for the user if the nodes' metrics select no round; None: they do."""
    if count != 2:
        return None
    return (
        "with two nodes the run exports its last round, and early stopping has no effect, because neither node's "
        f"metrics can be checked; from {DECIDING} nodes on, a trimmed mean selects the round (docs/robustness.md)"
    )


def describe_few_reports(evaluated: int, reporting: int) -> str | None:
    """Return a note for the user if too few nodes sent metrics to select a round; None: enough did.

    Args:
        evaluated: Number of nodes that are evaluated. ``describe_few_nodes`` describes two of them.
        reporting: Number of nodes that sent metrics.
    """
    if evaluated < DECIDING or reporting >= DECIDING:
        return None
    return (
        f"only {reporting} of {evaluated} nodes sent validation metrics (others did not reply, or have fewer "
        f"validation examples than limits.evaluation_examples in their files): until {DECIDING} nodes "
        "have, the run's last round is the best, and early stopping has no effect (docs/robustness.md)"
    )


def count_trimmed_clients(count: int) -> int:
    """Return how many of ``count`` clients do not count at each end of a trimmed mean: a tenth, rounded up."""
    return math.ceil(count / 10) if count >= DECIDING else 0


def compute_trimmed_means(rows: Mapping[str, Mapping[str, float]], names: Iterable[str]) -> dict[str, float]:
    """Compute means of metrics without the clients with the smallest and the largest values.

    A single client can move such a mean of at least three only within the range of the other clients' values.

    Args:
        rows: Metrics by client, each with its weight under ``examples``.
        names: The metrics; one that no client has is left out.

    Returns:
        Weighted means by metric, each over the clients that have it.
    """
    means: dict[str, float] = {}
    for name in names:
        order = sorted((id for id, row in rows.items() if name in row), key=lambda id: rows[id][name])
        dropped = count_trimmed_clients(len(order))
        if left := sorted(order[dropped : len(order) - dropped]):
            weights = [rows[id]["examples"] for id in left]
            means[name] = float(np.average([rows[id][name] for id in left], weights=weights))
    return means
