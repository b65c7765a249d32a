"""Intervals of differences, and the rule that decides whether a claim holds, is contradicted, or is inconclusive.

The difference of two results has two sources of noise: the seeds, and the items of the test set that all seeds share.
Its standard error is the root of the sum of both squared errors. That of the items is the one of a mean (accuracy) or a
bootstrap over the items (other scores of classes) of the mean difference over the seeds. With one seed it is the only
one; if each seed has a test set of its own, the spread of the seeds includes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fedspan.runs.predictions import Items
from fedspan.tasks.label_scores import LABEL_METRICS
from fedspan.tasks.metrics import METRICS

_LEVEL = 0.95
_RESAMPLES = 1000
_ROUNDING = 1e-12
"""Standard error below which differences are equal but for rounding."""

Verdict = Literal["holds", "contradicted", "inconclusive"]


@dataclass(frozen=True)
class Difference:
    """A difference of two results with its 95 % interval."""

    mean: float
    """First minus second result, in the unit of the metric."""
    low: float | None = None
    """Lower end of the interval; None: there is none."""
    high: float | None = None
    note: str = ""
    """Why there is no interval, or what it lacks; empty if it lacks nothing."""

    @property
    def is_measurable(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    def describe(self, metric: str, other: str) -> str:
        """Describe the difference as a predicate: ``1.2 points (0.3 to 2.1) above the start``."""
        if not math.isfinite(self.mean):
            return f"not comparable with {other} (a score is not a number)"
        direction = "above" if self.mean > 0 else "below"
        if self.low is None or self.high is None:
            gap = format_gap(metric, self.mean)
            return f"{gap} {direction} {other} ({self.note})" if self.mean else f"equal to {other}"
        note = f"; {self.note}" if self.note else ""
        if not self.is_measurable:
            return f"not measurably different from {other} ({self.format(metric)}{note})"
        ends = sorted((abs(self.low), abs(self.high)))
        low, high = (format_gap(metric, end).removesuffix(" points") for end in ends)
        return f"{format_gap(metric, self.mean)} ({low} to {high}{note}) {direction} {other}"

    def format(self, metric: str) -> str:
        """Format the difference as ``+1.2, +0.3 to +2.1``; only the mean without an interval."""
        factor, digits = (100, 1) if METRICS[metric].is_percentage else (1, 4)
        # Rounded first, so that no value is "-0.0".
        mean, *ends = (
            "" if value is None else f"{round(factor * value, digits) + 0.0:+.{digits}f}"
            for value in (self.mean, self.low, self.high)
        )
        return f"{mean}, {' to '.join(ends)}" if all(ends) else mean


@dataclass(frozen=True)
class Within:
    """A mean with its 95 % interval and the verdict on it."""

    mean: float
    """The mean, in the unit of the compared values."""
    half_width: float
    """Half the width of the interval, by Student's t; infinite for a single value."""
    verdict: Verdict

    def __str__(self) -> str:
        return f"{self.mean:+.1f}" + (f" ± {self.half_width:.1f}" if math.isfinite(self.half_width) else "")


def estimate_standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean, from the sample variance; infinite for a single value."""
    if len(values) < 2:
        return math.inf
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


def estimate_difference(
    metric: str,
    first: Sequence[float],
    second: Sequence[float],
    items: Sequence[tuple[Items, Items] | None] = (),
) -> Difference:
    """Estimate the difference of two results, seed by seed.

    Args:
        first: One score for each seed.
        second: Scores of the other side for the same seeds, in the same order.
        items: The predictions of both sides, one pair for each seed, or none; None in place of a pair: not known.
    """
    differences = [one - other for one, other in zip(first, second, strict=True)]
    if items and len(items) != len(differences):
        raise ValueError(f"{len(items)} pairs of predictions for {len(differences)} seeds")
    by_items = _estimate_item_error(metric, items)
    note = "" if by_items is not None else "without the noise of the test items"
    return _build_interval(differences, by_items or 0.0, "seed", note)


def compare_clients(
    metric: str, first: Mapping[str, Mapping[str, Any]], second: Mapping[str, Mapping[str, Any]]
) -> Difference | None:
    """Compare the clients' mean scores on their own tests; the clients are the sample. None: there are none."""
    scores = [(side.get(metric), second.get(id, {}).get(metric)) for id, side in first.items()]
    differences = [one - other for one, other in scores if one is not None and other is not None]
    differences, count = [value for value in differences if math.isfinite(value)], len(first.keys() | second.keys())
    if not differences:
        return None
    note = "" if len(differences) == count else f"{len(differences)} of {count} clients have both scores"
    return _build_interval(differences, 0.0, "client", note)


def _build_interval(values: Sequence[float], by_items: float, unit: str, note: str) -> Difference:
    """Build the interval of a mean over seeds or clients; ``by_items`` is its standard error from the test items."""
    from scipy import stats  # it is slow to import, and few commands need it

    mean, count = math.fsum(values) / len(values), len(values)
    error = estimate_standard_error(values) if count > 1 else 0.0
    total = math.hypot(error, by_items)
    if total < _ROUNDING or not math.isfinite(mean):
        reason = (
            f"all {count} {unit}s have the same difference: no interval" if count > 1 else f"one {unit}: no interval"
        )
        return Difference(mean, note=f"{reason}; {note}" if note and unit == "client" else reason)
    freedom = (count - 1) * (total / error) ** 4 if error else math.inf  # Welch and Satterthwaite
    half = float(stats.t.ppf((1 + _LEVEL) / 2, freedom)) * total
    return Difference(mean, mean - half, mean + half, note)


def _estimate_item_error(metric: str, items: Sequence[tuple[Items, Items] | None]) -> float | None:
    """Estimate the standard error of the mean difference over the seeds from the test items; None: not known."""
    pairs = [pair for pair in items if pair is not None]
    if not pairs or len(pairs) < len(items) or any(one.examples != other.examples for one, other in pairs):
        return None
    test_sets = {one.examples for one, _ in pairs}
    if len(test_sets) == len(pairs) > 1:
        return 0.0  # the spread of the seeds includes it
    targets = pairs[0][0].targets
    if len(test_sets) > 1 or metric not in LABEL_METRICS or len(targets) < 2:
        return None
    if metric == "accuracy":  # a mean over the items: no resampling of predictions is needed
        correct = [(side.predicted == side.targets).mean(0) for pair in pairs for side in pair]
        by_item = np.mean([one - other for one, other in zip(correct[::2], correct[1::2], strict=True)], axis=0)
        return float(by_item.std(ddof=1) / math.sqrt(len(by_item)))

    rng, means = np.random.default_rng(0), list[float]()
    for _ in range(_RESAMPLES):
        rows = rng.integers(len(targets), size=len(targets))
        means.append(
            float(
                np.mean([one.compute_score(metric, rows) - other.compute_score(metric, rows) for one, other in pairs])
            )
        )
    return float(np.std(means, ddof=1))


def format_gap(metric: str, value: float) -> str:
    """Format the size of a difference, in percentage points for shares."""
    return f"{100 * abs(value):.1f} points" if METRICS[metric].is_percentage else f"{abs(value):.4f}"


def compare_pairs(better: Sequence[float], worse: Sequence[float]) -> Within:
    """Decide whether ``better`` is above ``worse``, seed by seed.

    *holds* if the 95 % interval of the mean difference is above 0, *contradicted* if it is below, else *inconclusive*.
    A difference that is the same for each of several seeds, as one of bytes, is exact.

    Args:
        better: One value for each seed, of the side that is claimed to be above.
        worse: Values of the other side for the same seeds, in the same order.
    """
    differences = [better_score - worse_score for better_score, worse_score in zip(better, worse, strict=True)]
    mean, half = math.fsum(differences) / len(differences), _compute_half_width(differences)
    verdict: Verdict = "inconclusive"
    if abs(mean) > half:
        verdict = "holds" if mean > 0 else "contradicted"
    return Within(mean, half, verdict)


def compare_to(values: Sequence[float], target: float, tolerance: float) -> Within:
    """Decide whether a mean is within ``tolerance`` of a number reported in a paper.

    *holds* if the 95 % interval of the mean lies within the tolerance, *contradicted* if it lies entirely outside, else
    *inconclusive*.

    Args:
        tolerance: Largest distance from it that counts as reproduced, in the same unit.
    """
    mean, half = math.fsum(values) / len(values), _compute_half_width(values)
    distance, verdict = abs(mean - target), "inconclusive"
    if distance + half <= tolerance:
        verdict = "holds"
    elif distance - half > tolerance:
        verdict = "contradicted"
    return Within(mean, half, verdict)


def _compute_half_width(values: Sequence[float]) -> float:
    """Return half the width of the 95 % interval of a mean, by Student's t; infinite for a single value."""
    from scipy import stats  # it is slow to import, and few commands need it

    error = estimate_standard_error(values)
    return float(stats.t.ppf((1 + _LEVEL) / 2, len(values) - 1)) * error if len(values) > 1 else error
