"""How far counts are from those of uniform draws."""

from typing import Any

import numpy as np


def chi_square(counts: np.ndarray[Any, Any]) -> float:
    """Distance from a uniform distribution, in standard deviations of what chance makes of it."""
    expected, free = counts.sum() / len(counts), len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - free) / (2 * free) ** 0.5)
