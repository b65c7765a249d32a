"""The limit on the weights of clients, which declare their numbers of examples themselves."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

__all__ = ["weight_limit"]


def weight_limit(weights: Sequence[float], ratio: float | None) -> float | None:
    """Return the largest weight that a client may have; None: no limit.

    Args:
        weights: The weights of all clients that are combined.
        ratio: Maximum weight, as a multiple of the median; None: no limit.
    """
    middle = statistics.median(weights) if weights else 0.0
    return ratio * middle if ratio is not None and middle > 0 else None
