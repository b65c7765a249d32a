"""The rule that decides whether a claim holds, is contradicted, or is inconclusive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Verdict", "Within", "compare_pairs", "compare_to", "estimate_standard_error"]

Verdict = Literal["holds", "contradicted", "inconclusive"]


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
