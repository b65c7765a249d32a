"""The one rule by which a claim holds, is contradicted, or neither."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Verdict", "Within", "near", "paired", "standard_error"]

Verdict = Literal["holds", "contradicted", "inconclusive"]


@dataclass(frozen=True)
class Within:
    """A mean with its standard error and the verdict on it.

    Args:
        mean: in the unit of what was compared.
        error: standard error of the mean; infinite for a single value.
        verdict: by the rule.
    """

    mean: float
    error: float
    verdict: Verdict

    def __str__(self) -> str:
        return f"{self.mean:+.1f} ± {self.error:.1f}"


def standard_error(values: Sequence[float]) -> float:
    """Of the mean, from the sample variance; infinite for a single value, which says nothing of its error."""
    if len(values) < 2:
        return math.inf
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


def paired(better: Sequence[float], worse: Sequence[float]) -> Within:
    """Whether ``better`` is above ``worse``, seed by seed.

    *holds* if the mean difference exceeds two standard errors in that direction, *contradicted* if in the other,
    else *inconclusive*.

    Args:
        better: one value for each seed, of what is said to be above.
        worse: under the same seeds, in their order.

    Raises:
        ValueError: if there are more of one than of the other.
    """
    differences = [one - other for one, other in zip(better, worse, strict=True)]
    mean, error = math.fsum(differences) / len(differences), standard_error(differences)
    verdict: Verdict = "inconclusive"
    if abs(mean) > 2 * error:
        verdict = "holds" if mean > 0 else "contradicted"
    return Within(mean, error, verdict)


def near(values: Sequence[float], target: float, tolerance: float) -> Within:
    """Whether a mean is within ``tolerance`` of a number that a paper names.

    *holds* if the mean with two standard errors either way lies within the tolerance, *contradicted* if all of that
    lies outside it, else *inconclusive*.

    Args:
        values: one for each seed.
        target: the paper's number.
        tolerance: how far from it still counts as reproduced, in the same unit.
    """
    mean, error = math.fsum(values) / len(values), standard_error(values)
    apart, verdict = abs(mean - target), "inconclusive"
    if apart + 2 * error <= tolerance:
        verdict = "holds"
    elif apart - 2 * error > tolerance:
        verdict = "contradicted"
    return Within(mean, error, verdict)
