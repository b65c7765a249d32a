"""Reductions that a few replies can't move far: the median and the trimmed mean, coordinate by coordinate.

Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018, arXiv 1803.01498:
definitions 1 and 2. Replies count alike, whatever their weights: a weight is what a client says of itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedspan.core.values import Client, Contribution, Reduced
from fedspan.engines.reduction import Reducer
from fedspan.engines.settings import RoundSettings

__all__ = ["RobustReducer", "reducer_for"]


def reducer_for(settings: RoundSettings, cohort: Sequence[Client]) -> Reducer:
    """The reducer that a run asks for."""
    return Reducer(cohort) if settings.reduction == "mean" else RobustReducer(cohort, settings.reduction, settings.trim)


class RobustReducer(Reducer):
    """Holds all replies of a round and reduces each coordinate by itself.

    Args:
        cohort: the clients asked this round.
        rule: ``median`` or ``trimmed-mean``.
        trim: share of the replies that ``trimmed-mean`` drops at each end, rounded up.
    """

    def __init__(self, cohort: Sequence[Client], rule: str, trim: float) -> None:
        super().__init__(cohort)
        self._rule, self._trim = rule, trim
        self._held: list[Contribution] = []

    def _fold(self, client: Client, contribution: Contribution | None) -> None:
        if contribution is not None:
            if contribution.stack:
                raise ValueError("replies that are kept apart have no median")
            self._held.append(contribution)

    def result(self) -> Reduced:
        if self._position < len(self._order):
            raise ValueError(f"no contribution yet of client {self._order[self._position]!r}")
        if not self._held:
            raise ValueError("no reply in this round")
        names = dict.fromkeys(name for one in self._held for name in one.sum)
        return Reduced(mean={name: self._reduced(name) for name in names}, count=len(self._held))

    def _reduced(self, name: str) -> Tensor:
        like = next(one.sum[name] for one in self._held if name in one.sum)
        nothing = torch.zeros_like(like)
        values = torch.stack([one.sum.get(name, nothing) for one in self._held]).to(torch.float64).sort(dim=0).values
        count, most = len(values), (len(values) - 1) // 2  # the median drops all but the middle one or two
        dropped = most if self._rule == "median" else min(math.ceil(self._trim * count), most)
        kept = values[dropped : count - dropped].mean(0)
        return kept.to(like.dtype) if like.is_floating_point() else kept
