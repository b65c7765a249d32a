"""Numbers that clients report of themselves, and which of them no client can have."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fedspan.federation.changes import ENOUGH_REPLIES, compute_capped_median
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
