"""Limits on the weights of clients, which between machines declare their numbers of examples themselves."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from fedspan.federation.progress import ClientData


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
