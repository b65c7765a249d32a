"""Robust reductions, which a minority of hostile clients cannot move far: they hold all replies of a round.

Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018, arXiv:1803.01498:
median and trimmed mean of each coordinate.

Multi-Krum (Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", NeurIPS 2017,
arXiv:1703.02757): a reply's score is the sum of its squared distances to its n - f - 2 nearest replies; the result is
the mean of the n - f replies with the smallest scores.

Geometric median (RFA; Pillutla et al., "Robust Aggregation for Federated Learning", IEEE TSP 2022, arXiv:1912.13445):
argmin_v sum_i p_i ||v - x_i||, by the smoothed Weiszfeld iteration with weights p_i / max(nu, ||v - x_i||).

FLAME (Nguyen et al., "FLAME: Taming Backdoors in Federated Learning", USENIX Security 2022, arXiv:2101.02281): HDBSCAN
on the cosine distances of changes keeps the one cluster that holds more than half of them; changes are clipped to the
median norm S of all, averaged plainly, and get Gaussian noise of standard deviation lambda S.

Deviations: All of them act on what a method sums, which for low-rank methods are factors rather than models. Median,
trimmed mean, multi-Krum and FLAME count all clients alike, as the papers do; RFA weighs them. nu is relative to the
median distance; RFA's three communication rounds are one computation here, which iterates until v rests. FLAME's
cosines are those of changes, not of models, since a model's frozen part is common to all; lambda is the paper's 0.001.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from fedspan.core.tensors import Tensors, create_generator
from fedspan.core.values import Client, Contribution, Reduced
from fedspan.federation.aggregation.reduction import Reducer
from fedspan.federation.changes import apply_change, compute_change

_ITERATIONS = 100
_AT_REST = 1e-8
"""Step of the geometric median, over the median distance from it, at which the iteration ends."""
_SMOOTHING = 1e-6
"""nu of the smoothed Weiszfeld iteration, over the median distance."""
_NOISE = 0.001
"""FLAME's lambda."""
_MIN_REPLIES = 3
"""Replies below which there is no majority to compare with, so that all of them count."""


class RobustReducer(Reducer, ABC):
    """Collects all replies of a round, in client-id order."""

    def __init__(self, cohort: Sequence[Client]) -> None:
        super().__init__(cohort)
        self._contributions: list[Contribution] = []
        self._shares: list[float] = []

    def _check(self, contribution: Contribution) -> Contribution:
        if contribution.stack:
            raise ValueError("replies that are stacked are not summed")
        return contribution

    def _fold(self, client: Client, contribution: Contribution | None) -> None:
        if contribution is not None:
            self._contributions.append(contribution)
            self._shares.append(client.weight if contribution.weight is None else contribution.weight)

    def compute_sum(self) -> Tensors:
        raise ValueError("the reduction is no sum, so no noise is known that would protect a client in it")

    def compute_result(self) -> Reduced:
        self._require_all()
        if not self._contributions:
            raise ValueError("no reply in this round")
        return Reduced(mean=self._combine(), count=len(self._contributions))

    @abstractmethod
    def _combine(self) -> dict[str, Tensor]:
        """Return the reduction of the contributions."""

    def _list_tensors(self) -> dict[str, Tensor]:
        """Return the name of every summed tensor with one reply's tensor of that name."""
        return {
            name: value for contribution in reversed(self._contributions) for name, value in contribution.sum.items()
        }

    def _flatten(self) -> Tensor:
        """Return all replies as rows in float64; tensors that a client omits are zero."""
        names = self._list_tensors()
        rows = [
            torch.cat(
                [contribution.sum.get(name, torch.zeros_like(like)).double().flatten() for name, like in names.items()]
            )
            for contribution in self._contributions
        ]
        return torch.stack(rows)

    def _unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Return a flat result by name, in the replies' formats; means of integers are float64."""
        names = self._list_tensors()
        parts = flat.split([like.numel() for like in names.values()])
        return {
            name: part.view(like.shape).to(like.dtype if like.is_floating_point() else torch.float64)
            for (name, like), part in zip(names.items(), parts, strict=True)
        }


class CoordinateReducer(RobustReducer):
    """Reduces each coordinate separately.

    Args:
        rule: Name of the rule, ``median`` or ``trimmed-mean``.
        trim: Fraction of the replies that ``trimmed-mean`` drops at each end, rounded up.
    """

    def __init__(self, cohort: Sequence[Client], rule: str, trim: float) -> None:
        super().__init__(cohort)
        self._rule, self._trim = rule, trim

    def _combine(self) -> dict[str, Tensor]:
        return {name: self._reduce(name, like) for name, like in self._list_tensors().items()}

    def _reduce(self, name: str, like: Tensor) -> Tensor:
        zeros = torch.zeros_like(like)
        values = (
            torch.stack([contribution.sum.get(name, zeros) for contribution in self._contributions])
            .to(torch.float64)
            .sort(dim=0)
            .values
        )
        count, droppable = len(values), (len(values) - 1) // 2  # the median drops all but the middle one or two
        dropped = droppable if self._rule == "median" else min(math.ceil(self._trim * count), droppable)
        middle = values[dropped : count - dropped].mean(0)
        return middle.to(like.dtype) if like.is_floating_point() else middle


class MultiKrumReducer(RobustReducer):
    """Mean of the replies that are nearest to their neighbors.

    Args:
        trim: Fraction of the replies that may be hostile, f / n, rounded up.
    """

    def __init__(self, cohort: Sequence[Client], trim: float) -> None:
        super().__init__(cohort)
        self._trim = trim

    def _combine(self) -> dict[str, Tensor]:
        flat = self._flatten()
        return self._unflatten(flat[select_by_multi_krum(flat, math.ceil(self._trim * len(flat)))].mean(0))


class GeometricMedianReducer(RobustReducer):
    """Weighted geometric median of the replies."""

    def _combine(self) -> dict[str, Tensor]:
        flat, weights = self._flatten(), torch.tensor(self._shares, dtype=torch.float64)
        if not float(weights.sum()) > 0:
            raise ValueError("no reply of positive weight in this round")
        return self._unflatten(compute_geometric_median(flat, weights / weights.sum()))


class FlameReducer(RobustReducer):
    """Clipped and noisy mean of the majority's changes."""

    def __init__(self, cohort: Sequence[Client], origin: Tensors, seed: int, round: int) -> None:
        super().__init__(cohort)
        self._origin, self._seed, self._round = origin, seed, round

    def _check(self, contribution: Contribution) -> Contribution:
        return Contribution(sum=compute_change(super()._check(contribution), self._origin))

    def _combine(self) -> dict[str, Tensor]:
        flat = self._flatten()
        norms = flat.norm(dim=1)
        limit = statistics.median(norms.tolist())
        cluster = find_largest_cluster(flat)
        longest = limit if len(flat) >= _MIN_REPLIES else math.inf
        clipped = flat[cluster] * (longest / norms[cluster].clamp_min(1e-300)).clamp_max(1.0)[:, None]
        rng = create_generator(self._seed, "flame", self._round)
        noise = torch.randn(flat.shape[1], generator=rng, dtype=torch.float64)
        return apply_change(self._unflatten(clipped.mean(0) + _NOISE * limit * noise), self._origin)


def select_by_multi_krum(replies: Tensor, hostile: int) -> list[int]:
    """Return the positions of the replies that multi-Krum selects, in ascending order.

    Args:
        replies: Replies, one a row, float64 (n, d).
        hostile: Number f of replies that may be hostile; at most (n - 3) / 2 are taken into account.
    """
    count = len(replies)
    hostile = min(hostile, (count - _MIN_REPLIES) // 2)
    if hostile < 1:
        return list(range(count))
    squared = torch.cdist(replies, replies, compute_mode="donot_use_mm_for_euclid_dist").square()
    squared.fill_diagonal_(math.inf)
    scores = squared.sort(dim=1).values[:, : count - hostile - 2].sum(1)
    return sorted(scores.argsort(stable=True)[: count - hostile].tolist())


def compute_geometric_median(replies: Tensor, weights: Tensor) -> Tensor:
    """Compute argmin_v sum_i p_i ||v - x_i|| by the smoothed Weiszfeld iteration, from the weighted mean.

    Args:
        replies: Replies x, one a row, float64 (n, d).
        weights: Weights p, which sum to 1, float64 (n,).

    Returns:
        The geometric median v, (d,).
    """
    median = weights @ replies
    for _ in range(_ITERATIONS):
        distances = (replies - median).norm(dim=1)
        spread = float(distances.median()) or float(distances.mean())  # few replies cannot move the median
        if not spread > 0:
            break
        shares = weights / distances.clamp_min(_SMOOTHING * spread)
        last, median = median, (shares / shares.sum()) @ replies
        if float((median - last).norm()) <= _AT_REST * spread:
            break

    def cost(point: Tensor) -> float:
        return float(weights @ (replies - point).norm(dim=1))

    # a median that is one of the replies is approached ever more slowly, so it may not have been reached
    nearest = replies[int((replies - median).norm(dim=1).argmin())]
    return nearest.clone() if cost(nearest) < cost(median) else median


def find_largest_cluster(changes: Tensor) -> list[int]:
    """Return the positions of the changes in the cluster of more than half of them, by cosine distance.

    Args:
        changes: Changes, one a row, float64 (n, d).

    Returns:
        The positions in ascending order; all of them if they form no cluster, or if there are too few to compare.
    """
    count = len(changes)
    if count < _MIN_REPLIES:
        return list(range(count))
    from sklearn.cluster import HDBSCAN  # it is slow to import, and only this rule needs it

    directions = torch.nn.functional.normalize(changes, dim=1)
    distances = (1 - directions @ directions.T).clamp_min(0.0).fill_diagonal_(0.0)
    distances = (distances + distances.T) / 2
    labels = HDBSCAN(
        min_cluster_size=count // 2 + 1,
        min_samples=1,
        allow_single_cluster=True,
        metric="precomputed",
        copy=True,  # pyright: ignore[reportArgumentType]  scikit-learn's own annotation is wrong
    ).fit_predict(distances.numpy())
    positions = [position for position, label in enumerate(labels.tolist()) if label == 0]
    return positions or list(range(count))
