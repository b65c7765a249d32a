"""What a data owner's metrics and losses say of its examples: they are rounded, so that small groups do not show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fedspan.federation.protocol import Part
from fedspan.tasks.metrics import METRICS

__all__ = ["coarsen_losses", "coarsen_metrics"]


def coarsen_metrics(scores: Mapping[str, float], examples: int, loss_bound: float) -> dict[str, float]:
    """Round metrics to multiples of ``examples`` / 2n of their largest value, for n examples.

    No group of fewer than half of ``examples`` shows in a mean over examples. Metrics without bounds are left out,
    but for the exponential of the loss.

    Args:
        scores: Metrics of one part, with their number of ``examples``; no example contributes more than
            ``loss_bound`` to the loss (``tasks.bounded_losses``).
        examples: Examples that a part needs; 1: metrics are returned as they are.
        loss_bound: The largest loss.

    Returns:
        The metrics; empty if the part has too few examples.
    """
    count = scores.get("examples", 0.0)
    if count < examples:
        return {}
    if examples == 1:
        return dict(scores)
    step, coarse = examples / (2 * count), {"examples": count}
    if "loss" in scores:
        coarse["loss"] = _round(scores["loss"], step * loss_bound, 0.0, loss_bound)
    for name, value in scores.items():
        metric = METRICS.get(name)
        if metric is None or name == "loss":
            continue
        if metric.is_exponential_of_loss and "loss" in coarse:
            coarse[name] = math.exp(coarse["loss"])
        elif math.isfinite(metric.scale):
            coarse[name] = _round(value, step * metric.scale, metric.minimum, metric.maximum)
    return {name: coarse[name] for name in scores if name in coarse}


def coarsen_losses(parts: Sequence[Part], owned: int, examples: int, loss_bound: float) -> tuple[Part, ...]:
    """Bound and round the mean losses of a training like those of an evaluation.

    Args:
        parts: Losses of the phases, with the numbers of examples that they used, each use counted.
        owned: Number of the client's training examples.
        examples: Examples that a phase needs; otherwise no loss is returned. 1: losses are returned as they are.
        loss_bound: The largest loss.
    """
    if examples == 1:
        return tuple(parts)
    counts = [min(part.examples, owned) for part in parts]
    if any(count < examples for count in counts):
        return ()
    return tuple(
        Part(loss=_round(part.loss, examples / (2 * count) * loss_bound, 0.0, loss_bound), examples=part.examples)
        for part, count in zip(parts, counts, strict=True)
    )


def _round(value: float, step: float, minimum: float, maximum: float) -> float:
    """Return the multiple of a step that is next to a value, within bounds."""
    return min(max(step * round(min(max(value, minimum), maximum) / step), minimum), maximum)
