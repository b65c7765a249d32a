"""Settings of a federation's rounds as plain values, built from the config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedspan.training.jobs import Privacy

__all__ = ["RoundSettings", "SecureSettings"]


@dataclass(frozen=True)
class RoundSettings:
    """Settings of the rounds.

    Args:
        rounds: Number of rounds.
        cohort: Number of clients selected in each round; None: all.
        seed: Seed of every random draw.
        reduction: Rule that combines summed replies.
        trim: Fraction of the replies that ``trimmed-mean`` drops at each end.
        max_norm: Norm to which ``clipped-mean`` clips changes; None: the median norm of the round.
        privacy: Privacy settings; with ``central``, a cohort is a Poisson sample of ``cohort`` clients on average.
        agreed: Digest of the config that all nodes were sent, which secure sums are bound to; empty in a simulation.
    """

    rounds: int
    cohort: int | None = None
    seed: int = 0
    reduction: Literal["mean", "median", "trimmed-mean", "clipped-mean"] = "mean"
    trim: float = 0.1
    max_norm: float | None = None
    privacy: Privacy | None = None
    agreed: str = ""


@dataclass(frozen=True)
class SecureSettings:
    """Settings of secure aggregation.

    Args:
        clip: Maximum norm of a client's change.
        bits: Bits of the summed integers, 32 or 64.
        threshold: Fraction of a neighbourhood that can reconstruct a secret of one of its clients.
        neighbours: Number of neighbours of every client; None: all other clients, up to a sufficient number.
    """

    clip: float = 100.0
    bits: Literal[32, 64] = 32
    threshold: float = 2 / 3
    neighbours: int | None = None
