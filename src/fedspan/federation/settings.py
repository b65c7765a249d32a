"""What a federation needs to know of its rounds, as plain values (the config builds them)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedspan.training.settings import Privacy

__all__ = ["RoundSettings", "SecureSettings"]


@dataclass(frozen=True)
class RoundSettings:
    """The rounds.

    Args:
        rounds: how many.
        cohort: clients asked each round; None: all.
        seed: of every draw.
        reduction: how replies that sum are combined.
        trim: share of the replies that ``trimmed-mean`` drops at each end.
        max_norm: to which ``clipped-mean`` scales larger changes down; None: the median of the round's.
        privacy: of the run; with ``central``, a cohort is a Poisson sample of ``cohort`` clients on average.
    """

    rounds: int
    cohort: int | None = None
    seed: int = 0
    reduction: Literal["mean", "median", "trimmed-mean", "clipped-mean"] = "mean"
    trim: float = 0.1
    max_norm: float | None = None
    privacy: Privacy | None = None


@dataclass(frozen=True)
class SecureSettings:
    """Secure aggregation.

    Args:
        clip: norm of what a client changes, at most.
        bits: of the integers that are summed, 32 or 64.
        threshold: share of a neighbourhood that can open a secret of one of its members.
        neighbours: of every client; None: all others, up to a number that is enough.
    """

    clip: float = 100.0
    bits: Literal[32, 64] = 32
    threshold: float = 2 / 3
    neighbours: int | None = None
