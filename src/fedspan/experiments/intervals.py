"""Intervals of differences, and the rule that decides whether a claim holds, is contradicted, or is inconclusive.

The difference of two results has two sources of noise: the seeds, and the items of the test set that all seeds share.
Its standard error is the root of the sum of both squared errors. That of the items is a bootstrap of the mean over the
seeds; with one seed it is the only one.
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

__all__ = [
    "Difference",
    "Verdict",
    "Within",
    "compare_clients",
    "compare_pairs",
    "compare_to",
    "estimate_difference",
    "estimate_standard_error",
    "format_gap",
]

_LEVEL = 0.95
_RESAMPLES = 1000

Verdict = Literal["holds", "contradicted", "inconclusive"]


@dataclass(frozen=True)
class Difference:
    """A difference of two results with its 95 % interval.

    Args:
        mean: First minus second result, in the unit of the metric.
        low: Lower end of the interval; None: there is none, for one seed without items.
        high: Upper end of the interval.
    """

    mean: float
    low: float | None = None
    high: float | None = None

    @property
    def is_measurable(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    def describe(self, metric: str, other: str) -> str:
        """Describe the difference as a predicate: ``1.2 points (0.3 to 2.1) above the start``."""
        if self.low is None or self.high is None:
            if self.mean == 0:
                return f"equal to {other}"
            direction = "above" if self.mean > 0 else "below"
            return f"{format_gap(metric, self.mean)} {direction} {other} (one seed: no interval)"
        if not self.is_measurable:
            return f"not measurably different from {other} ({self.format(metric)})"
        ends = sorted((abs(self.low), abs(self.high)))
        low, high = (format_gap(metric, end).removesuffix(" points") for end in ends)
        return f"{format_gap(metric, self.mean)} ({low} to {high}) {'above' if self.mean > 0 else 'below'} {other}"

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
    """A mean with its standard error and the verdict on it.

    Args:
        mean: The mean, in the unit of the compared values.
        error: Standard error of the mean; infinite for a single value.
        verdict: The verdict by the rule.
    """

    mean: float
    error: float
    verdict: Verdict

    def __str__(self) -> str:
        return f"{self.mean:+.1f} ± {self.error:.1f}"


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
        metric: The metric.
        first: One score for each seed.
        second: Scores of the other side for the same seeds, in the same order.
        items: The predictions of both sides, by seed; None, or none for a seed: they are not known.

    Raises:
        ValueError: If the two differ in length.
    """
    differences = [one - other for one, other in zip(first, second, strict=True)]
    by_items = _estimate_item_error(metric, items)
    if len(differences) < 2 and by_items is None:
        return Difference(differences[0])
    by_seeds = estimate_standard_error(differences) if len(differences) > 1 else 0.0
    return _build_interval(math.fsum(differences) / len(differences), by_seeds, len(differences), by_items or 0.0)


def compare_clients(
    metric: str, first: Mapping[str, Mapping[str, Any]], second: Mapping[str, Mapping[str, Any]]
) -> Difference | None:
    """Compare the clients' mean scores on their own tests; the clients are the sample. None: there are none.

    Args:
        metric: The metric.
        first: Metrics by client.
        second: Metrics by client of the other side.
    """
    scores = [(first[id].get(metric), second[id].get(metric)) for id in first if id in second]
    differences = [one - other for one, other in scores if one is not None and other is not None]
    if not differences:
        return None
    mean = math.fsum(differences) / len(differences)
    if len(differences) < 2:
        return Difference(mean)
    return _build_interval(mean, estimate_standard_error(differences), len(differences), 0.0)


def _build_interval(mean: float, error: float, count: int, by_items: float) -> Difference:
    """Build the interval of a mean of ``count`` values with their standard error, and that of the items."""
    from scipy import stats  # it is slow to import, and few commands need it

    total = math.hypot(error, by_items)
    freedom = (count - 1) * (total / error) ** 4 if error else math.inf  # Welch and Satterthwaite
    half = float(stats.t.ppf((1 + _LEVEL) / 2, freedom)) * total
    return Difference(mean, mean - half, mean + half)


def _estimate_item_error(metric: str, items: Sequence[tuple[Items, Items] | None]) -> float | None:
    """Estimate the standard error of the mean difference over the seeds from the test items; None: not known."""
    if metric not in LABEL_METRICS:
        return None
    pairs = [pair for pair in items if pair is not None]
    targets = pairs[0][0].targets if pairs else np.empty(0)
    is_shared = all(np.array_equal(side.targets, targets) for pair in pairs for side in pair)
    if not pairs or len(pairs) < len(items) or not is_shared or len(targets) < 2:
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

    *holds* if the mean difference exceeds two standard errors in that direction, *contradicted* if in the other,
    else *inconclusive*.

    Args:
        better: One value for each seed, of the side that is claimed to be above.
        worse: Values of the other side for the same seeds, in the same order.

    Raises:
        ValueError: If the two differ in length.
    """
    differences = [better_score - worse_score for better_score, worse_score in zip(better, worse, strict=True)]
    mean, error = math.fsum(differences) / len(differences), estimate_standard_error(differences)
    verdict: Verdict = "inconclusive"
    if abs(mean) > 2 * error:
        verdict = "holds" if mean > 0 else "contradicted"
    return Within(mean, error, verdict)


def compare_to(values: Sequence[float], target: float, tolerance: float) -> Within:
    """Decide whether a mean is within ``tolerance`` of a number reported in a paper.

    *holds* if the interval of two standard errors around the mean lies within the tolerance, *contradicted* if it lies
    entirely outside, else *inconclusive*.

    Args:
        values: One value for each seed.
        target: The number in the paper.
        tolerance: Largest distance from it that counts as reproduced, in the same unit.
    """
    mean, error = math.fsum(values) / len(values), estimate_standard_error(values)
    distance, verdict = abs(mean - target), "inconclusive"
    if distance + 2 * error <= tolerance:
        verdict = "holds"
    elif distance - 2 * error > tolerance:
        verdict = "contradicted"
    return Within(mean, error, verdict)
