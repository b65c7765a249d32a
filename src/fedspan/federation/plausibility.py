"""Numbers that clients report of themselves, and which of them no client can have."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

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
    rows, impossible = drop_impossible_metrics({id: {"loss": min(all, key=_sign_first)} for id, all in losses.items()})
    plausible = {id: reply for id, reply in replies.items() if rows.get(id) or id not in losses}
    return plausible, [(id, f"of its training, {reason}") for id, reason in impossible]


def _sign_first(loss: float) -> tuple[bool, float]:
    return loss >= 0, -loss


def compute_weight_limit(weights: Sequence[float], ratio: float | None) -> float | None:
    """Return the largest weight that a client may have; None: no limit.

    Args:
        weights: The weights of all clients that are combined.
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
        clients: All clients that are combined.
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
