"""Who masks with whom: everybody with everybody, or each with a few neighbours on a circle that nobody can foresee.

Bell et al. (eprint 2020/704) show that k neighbours do, k growing with the logarithm of the number of clients: on a
circle of clients in random order, each with the k / 2 next ones on either side (a Harary graph), so few of a client's
neighbours collude or drop out that the server can neither open one client's masks nor fail to remove all.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence

__all__ = ["COMPLETE", "neighbourhoods", "threshold_of"]

COMPLETE = 100
"""Neighbours at which more are not worth their cost: below, everybody is everybody's."""


def neighbourhoods(ids: Sequence[str], neighbours: int | None = None) -> dict[str, tuple[str, ...]]:
    """Every client's neighbours and itself, sorted; a client is a neighbour of its neighbours.

    Args:
        ids: different ones.
        neighbours: of a client, beside itself; rounded up to an even number; None: ``COMPLETE``.
    """
    wanted = COMPLETE if neighbours is None else neighbours
    half = math.ceil(wanted / 2)
    if 2 * half >= len(ids) - 1:
        return {id: tuple(sorted(ids)) for id in ids}
    circle = list(ids)
    secrets.SystemRandom().shuffle(circle)
    size = len(circle)
    return {
        id: tuple(sorted(circle[(at + step) % size] for step in range(-half, half + 1))) for at, id in enumerate(circle)
    }


def threshold_of(size: int, share: float) -> int:
    """Members of a neighbourhood that can open its shares.

    Args:
        size: of the neighbourhood, the client itself among them.
        share: of it; more than a half, so that no two disjoint groups can.
    """
    return min(size, max(2, math.floor(size / 2) + 1, math.ceil(share * size - 1e-9)))
