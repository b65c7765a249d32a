"""Test data for AJIVE with a known answer (a planted joint component, second moments under drift), and its timing.

``draw_second_moments`` is the synthetic setting of Peng et al., "Rethinking LoRA for Data Heterogeneous Federated
Learning: Subspace and State Alignment", arXiv:2602.01746, appendix F. Shapes: N rows, M columns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from fedspan.core.lowrank import LowRank

__all__ = ["draw_second_moments", "draw_views", "time_shortest"]

Result = TypeVar("Result")


def draw_views(size: int, rank: int, views: int, shared: bool, seed: int = 0) -> list[LowRank]:
    """Draw views v P (size, size) whose column spaces share rank // 2 directions, with one P for all or one each."""
    rng = torch.Generator().manual_seed(seed)

    def draw(rows: int, columns: int) -> Tensor:
        return torch.randn((rows, columns), generator=rng, dtype=torch.float64)

    def projector() -> Tensor:
        return torch.linalg.qr(draw(size, rank))[0].T

    common, P = draw(size, rank // 2), projector()
    individual_rank = rank - rank // 2
    return [
        LowRank(
            torch.cat([2 * common, draw(size, individual_rank)], 1) @ draw(rank, rank), P if shared else projector()
        )
        for _ in range(views)
    ]


def draw_second_moments(
    size: int, clients: int, drift: float, noise: float, seed: int, rank: int = 5, drift_rank: int = 2
) -> tuple[Tensor, list[Tensor]]:
    """Draw V* = (G*)^2 and the clients' V_k = (G* + L_k + Xi_k)^2, elementwise squares, all (size, size).

    G* and L_k are products of Gaussian factors, of ranks ``rank`` and ``drift_rank``, Xi_k is Gaussian; entries have
    variance 1 in G*, ``drift ** 2`` in L_k and ``noise ** 2`` in Xi_k. For a given seed the clients have a fixed order:
    a larger number of clients appends new ones.
    """
    rng = torch.Generator().manual_seed(seed)

    def draw(rows: int, columns: int) -> Tensor:
        return torch.randn((rows, columns), generator=rng, dtype=torch.float64)

    def product(inner: int) -> Tensor:
        return draw(size, inner) @ draw(inner, size) / inner**0.5

    G = product(rank)
    views = [(G + drift * product(drift_rank) + noise * draw(size, size)).square() for _ in range(clients)]
    return G.square(), views


def time_shortest(
    function: Callable[[], Result], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, Result]:
    """Return the shortest time of several calls, in seconds of the clock, and the result of the last call."""
    times: list[float] = []
    while True:
        begin = clock()
        result = function()
        times.append(clock() - begin)
        if len(times) >= repeats:
            return min(times), result
