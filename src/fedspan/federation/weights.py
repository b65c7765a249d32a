"""Limits on the weights of clients, which declare their numbers of examples themselves."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from fedspan.federation.progress import ClientData

__all__ = ["limit_weights", "weight_limit"]


def weight_limit(weights: Sequence[float], ratio: float | None) -> float | None:
    """Return the largest weight that a client may have; None: no limit.

    Args:
        weights: The weights of all clients that are combined.
        ratio: Maximum weight, as a multiple of the median; None: no limit.
    """
    median = statistics.median(weights) if weights else 0.0
    return ratio * median if ratio is not None and median > 0 else None


def limit_weights(clients: Mapping[str, ClientData], ratio: float | None) -> dict[str, float]:
    """Return the clients' weights, none above the client's own limit or the common one.

    Args:
        clients: All clients that are combined.
        ratio: Maximum weight, as a multiple of the median; None: no common limit.
    """
    weights = {
        id: data.client.weight if data.max_weight is None else min(data.client.weight, data.max_weight)
        for id, data in clients.items()
    }
    limit = weight_limit(list(weights.values()), ratio)
    return weights if limit is None else {id: min(weight, limit) for id, weight in weights.items()}
