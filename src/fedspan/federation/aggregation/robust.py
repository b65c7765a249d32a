"""Robust reductions, which a few outlying replies cannot move far.

The median and the trimmed mean, coordinate by coordinate: Yin et al., "Byzantine-Robust Distributed Learning: Towards
Optimal Statistical Rates", ICML 2018, arXiv 1803.01498, definitions 1 and 2. All replies count equally there, because
clients report their own weights.

The mean of clipped changes: Sun et al., "Can You Really Backdoor Federated Learning?", arXiv 1911.07963, section 3.
Replies keep their weights there.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from fedspan.core.tensors import Tensors, norm
from fedspan.core.values import Client, Contribution, Reduced
from fedspan.federation.aggregation.reduction import Reducer
from fedspan.federation.changes import apply_change, change_of, clip_change

__all__ = ["ClippedReducer", "RobustReducer"]


class RobustReducer(Reducer):
    """Collect all replies of a round and reduce each coordinate separately.

    Args:
        cohort: The clients selected for this round.
        rule: Name of the rule, ``median`` or ``trimmed-mean``.
        trim: Fraction of the replies that ``trimmed-mean`` drops at each end, rounded up.
    """

    def __init__(self, cohort: Sequence[Client], rule: str, trim: float) -> None:
        super().__init__(cohort)
        self._rule, self._trim = rule, trim
        self._held: list[Contribution] = []

    def _fold(self, client: Client, contribution: Contribution | None) -> None:
        if contribution is not None:
            if contribution.stack:
                raise ValueError("replies that are stacked have no median")
            self._held.append(contribution)

    def result(self) -> Reduced:
        self._require_all()
        names = dict.fromkeys(name for one in self._held for name in one.sum)
        return Reduced(mean={name: self._reduced(name) for name in names}, count=len(self._held))

    def _require_all(self) -> None:
        if self._position < len(self._order):
            raise ValueError(f"no contribution yet of client {self._order[self._position]!r}")
        if not self._held:
            raise ValueError("no reply in this round")

    def _reduced(self, name: str) -> Tensor:
        like = next(one.sum[name] for one in self._held if name in one.sum)
        nothing = torch.zeros_like(like)
        values = torch.stack([one.sum.get(name, nothing) for one in self._held]).to(torch.float64).sort(dim=0).values
        count, most = len(values), (len(values) - 1) // 2  # the median drops all but the middle one or two
        dropped = most if self._rule == "median" else min(math.ceil(self._trim * count), most)
        kept = values[dropped : count - dropped].mean(0)
        return kept.to(like.dtype) if like.is_floating_point() else kept


class ClippedReducer(RobustReducer):
    """Weighted mean of replies whose changes are clipped to a norm.

    Args:
        cohort: The clients selected for this round.
        origin: Contribution of a client that trained nothing.
        max_norm: Maximum norm of a change; None: the median norm of the round.
    """

    def __init__(self, cohort: Sequence[Client], origin: Tensors, max_norm: float | None) -> None:
        super().__init__(cohort, "clipped-mean", 0.0)
        self._origin, self._max_norm = origin, max_norm
        self._shares: list[float] = []

    def _fold(self, client: Client, contribution: Contribution | None) -> None:
        super()._fold(client, contribution)
        if contribution is not None:
            self._shares.append(client.weight if contribution.weight is None else contribution.weight)

    def result(self) -> Reduced:
        self._require_all()
        changes = [change_of(one, self._origin) for one in self._held]
        limit = statistics.median(map(norm, changes)) if self._max_norm is None else self._max_norm
        plain = Reducer([Client(f"{number:09}", 0, 0.0, 0, share) for number, share in enumerate(self._shares)])
        for number, change in enumerate(changes):
            plain.add(f"{number:09}", Contribution(sum=clip_change(change, limit)))
        found = plain.result()
        return Reduced(mean=apply_change(found.mean, self._origin), count=found.count)
