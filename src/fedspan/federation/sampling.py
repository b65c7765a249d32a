"""Sampling of a round's clients."""

from __future__ import annotations

import torch

from fedspan.core.tensors import generator

__all__ = ["cohort_of"]


def cohort_of(seed: int, round: int, clients: int, size: int | None, more: int = 0) -> list[int]:
    """Draw the positions of a round's clients and of ``more`` extra ones, in order of drawing; all, sorted, if all.

    Args:
        seed: Seed of the run.
        round: Number of the round, from 0.
        clients: Number of clients in the federation.
        size: Size of the cohort; None: all clients.
        more: Number of additional clients to select.
    """
    if size is None or size >= clients:
        return list(range(clients))
    return torch.randperm(clients, generator=generator(seed, "cohort", round))[: size + more].tolist()
