"""The masking graph: all pairs of clients, or each client with a few neighbors on an unpredictable circle.

Bell et al. (eprint 2020/704) show that k neighbors suffice, k growing with the logarithm of the number of clients: on
a circle of clients in random order, each with the k / 2 next ones on either side (a Harary graph), so few neighbors
of a client collude or drop out that the server can neither open one client's masks nor fail to remove all.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence

__all__ = ["COMPLETE", "compute_neighborhood_size", "compute_threshold", "select_neighborhoods"]

COMPLETE = 100
"""Neighbors beyond which more are not worth their cost; with fewer clients, all pairs are neighbors."""


def select_neighborhoods(ids: Sequence[str], neighbors: int | None = None) -> dict[str, tuple[str, ...]]:
    """Choose every client's neighbors, sorted and with the client itself; the relation is symmetric.

    Args:
        ids: Distinct client ids.
        neighbors: Neighbors of a client, itself excluded; rounded up to an even number; None: ``COMPLETE``.
    """
    size = compute_neighborhood_size(len(ids), neighbors)
    if size == len(ids):
        return {id: tuple(sorted(ids)) for id in ids}
    circle = list(ids)
    secrets.SystemRandom().shuffle(circle)
    half = size // 2
    return {
        id: tuple(sorted(circle[(position + step) % len(circle)] for step in range(-half, half + 1)))
        for position, id in enumerate(circle)
    }


def compute_neighborhood_size(clients: int, neighbors: int | None = None) -> int:
    """Compute the number of clients in a neighborhood, the client itself included.

    Args:
        clients: Number of all clients.
        neighbors: Neighbors of a client, itself excluded; rounded up to an even number; None: ``COMPLETE``.
    """
    return min(clients, 2 * math.ceil((COMPLETE if neighbors is None else neighbors) / 2) + 1)


def compute_threshold(size: int, share: float) -> int:
    """Compute the number of clients in a neighborhood that can open its shares.

    Args:
        size: Size of the neighborhood, the client itself included.
        share: Share of the neighborhood; raised above one half, so that no two disjoint groups can.
    """
    return min(size, max(2, math.floor(size / 2) + 1, math.ceil(share * size - 1e-9)))
