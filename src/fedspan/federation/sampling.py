"""Sampling of a round's clients."""

from __future__ import annotations

import torch

from fedspan.core.tensors import generator

__all__ = ["cohort_of"]


def cohort_of(seed: int, round: int, clients: int, size: int | None, more: int = 0) -> list[int]:
    """Positions of a round's clients and so many more, in the order in which they are drawn; all, in order, if all.

    Args:
        seed: the run's.
        round: number, from 0.
        clients: of the federation.
        size: of the cohort; None: all.
        more: clients to be asked beyond that.
    """
    if size is None or size >= clients:
        return list(range(clients))
    return torch.randperm(clients, generator=generator(seed, "cohort", round))[: size + more].tolist()
