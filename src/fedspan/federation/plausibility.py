"""Numbers that clients report of themselves, and which of them no client can have."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from fedspan.federation.changes import ENOUGH_REPLIES, compute_capped_median
from fedspan.federation.progress import ClientData
from fedspan.federation.protocol import Reply, Scores
from fedspan.tasks.metrics import METRICS

_FAR = 1000.0
"""Multiple of the median beyond which a loss or perplexity is not believed."""


def drop_impossible_metrics(
    reported: Mapping[str, Scores],
) -> tuple[dict[str, dict[str, float]], list[tuple[str, str]]]:
    """Remove metrics that no client can have.

    Impossible are values outside the metric's range and, of metrics without an upper bound, those of more than 1000
    times the clients' median, or 1000 if the median is smaller than 1.

    Returns:
        The possible ones by client, and the client and the reason of each one that was removed.
    """
    rows: dict[str, dict[str, float]] = {id: {} for id in reported}
    impossible: list[tuple[str, str]] = []
    for name, metric in METRICS.items():
        values = {id: row[name] for id, row in reported.items() if name in row}
        median = compute_capped_median(values.values()) if len(values) >= ENOUGH_REPLIES else math.inf
        limit = math.inf if metric.is_bounded else _FAR * max(1.0, median)
        for id, value in values.items():
            if metric.is_possible(value) and value <= limit:
                rows[id][name] = value
            else:
                upper = min(metric.maximum, limit)
                impossible.append((id, f"{metric.title} {value:.3g} is not from {metric.minimum:g} to {upper:.3g}"))
    return rows, impossible


def drop_impossible_losses(replies: Mapping[str, Reply]) -> tuple[dict[str, Reply], list[tuple[str, str]]]:
    """Remove replies with a training loss that no client can have (``drop_impossible_metrics``).

    Returns:
        The other replies by client, and the client and the reason of each one that was removed.
    """
    losses = {id: [part.loss for part in reply.parts] for id, reply in replies.items() if reply.parts}
    # of several phases the least plausible one: a negative loss, or else the largest
    worst = {id: {"loss": min(all, key=lambda loss: (loss >= 0, -loss))} for id, all in losses.items()}
    rows, impossible = drop_impossible_metrics(worst)
    plausible = {id: reply for id, reply in replies.items() if rows.get(id) or id not in losses}
    return plausible, [(id, f"of its training, {reason}") for id, reason in impossible]


def compute_weight_limit(weights: Sequence[float], ratio: float | None) -> float | None:
    """Return the largest weight that a client may have; None: no limit.

    Args:
        ratio: Maximum weight, as a multiple of the median (the lower middle weight if their number is even); None: no
            limit.
    """
    median = statistics.median_low(weights) if weights else 0.0  # the mean of the middle two grows with a lie
    return ratio * median if ratio is not None and median > 0 else None


def limit_weights(clients: Mapping[str, ClientData], ratio: float | None) -> dict[str, float]:
    """Return the clients' weights, none above the client's own limit or, for declared weights, the common one.

    The common limit is for numbers of examples that nobody can check. A client whose examples this process assigned,
    or whose operator admitted it with a number, is not below it: where data are skewed, an honest client may well hold
    half of all examples, and the others know too few classes to train without it.

    Args:
        ratio: Maximum weight of a declared number, as a multiple of the median; None: no common limit.
    """
    weights = {
        id: data.client.weight if data.max_weight is None else min(data.client.weight, data.max_weight)
        for id, data in clients.items()
    }
    limit = compute_weight_limit(list(weights.values()), ratio)
    return {
        id: weight if limit is None or _is_known(clients[id]) else min(weight, limit) for id, weight in weights.items()
    }


def _is_known(data: ClientData) -> bool:
    """Check whether a client's weight rests on more than what the client declares."""
    return data.max_weight is not None or data.client.weight <= len(data.train)


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
