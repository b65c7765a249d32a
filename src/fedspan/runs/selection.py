"""Selection of the round that a run exports, and early stopping.

Rounds are compared by a validation metric, then by the validation loss, then the later one is better. Where the loss
decides and the model before the first round was measured, rounds are compared by a lower bound of their gain on it: by
how far the mean loss fell, minus one standard error. The clients are the samples, and their losses before and after are
paired: clients may have different losses, and count as noise only where their losses change differently. A round whose
gain is smaller than its standard error does not replace the start.

Clients that report their own metrics may lie. At least three are compared by trimmed means, which no single one moves
out of the others' range. A client that is not measured in a round counts with its last metrics, so silence in one round
moves nothing. The metrics of two clients select nothing, because neither can be checked: the last round is the best.

Exact losses of two rounds are equal only where the model does not change any more, so a round that merely equals the
best one counts as stalled. The metrics that nodes report have noise and are cut to their range
(``clients.metric_noise``): there, equal ones do not show whether the model still improves. Such a round is the best,
and the patience of early stopping begins anew. The best of many noisy rounds may be one whose noise was lucky: the mean
over the nodes' examples makes the noise small, and nodes with too few examples for that send none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from fedspan.config import RunConfig
from fedspan.federation.evaluation import ClientScores
from fedspan.federation.plausibility import DECIDING, compute_trimmed_means, count_trimmed_clients
from fedspan.tasks.metrics import compute_score

_WORST = -1e308
_MARGIN = 0.01
"""Share of the start's loss that counts as the standard error of a single client, which has none."""
_TOLERANCE = 1e-12
"""Difference, absolute and relative, up to which means of reported metrics are equal: sums of floats depend on which
client has which value."""
_LEAST_SPREAD = 1e-9
"""1 - sum_i w_i^2 below which one client's weight is so large that its gain has no standard error either."""


class Best(NamedTuple):
    """A rated round; a better one is larger.

    Args:
        score: The rank of the validation metric (larger is better), or the lower bound of the gain on the start; where
            no client has been measured, the round's number.
        tie: The rank of the validation loss, which decides between equal scores. Few validation examples give few
            different accuracies, so ties are common. The later of two rounds with equal losses is better.
        round: The round, from 1; 0: the start.
    """

    score: float
    tie: float
    round: int


class ClientLoss(NamedTuple):
    """A client's validation loss."""

    loss: float
    examples: float


class Gain(NamedTuple):
    """What a round's validation loss gains on the start."""

    mean: float
    standard_error: float


@dataclass(frozen=True)
class Selection:
    """The round that a run exports as far as it has come, and the one that early stopping counts from.

    Args:
        best: The best round, which has a checkpoint; None: no round has been evaluated.
        improved: The first round with the best metric or, of equal ones, the lowest loss, whether or not it gained more
            than noise; the last such round, where clients report their own metrics. Early stopping counts from it, so
            that a run whose rounds improve slowly continues until their gain exceeds its error.
        start: Validation losses of the start by client, where rounds are compared with them.
        measured: Whether any round has validation scores that select. Until then the last round is the best; afterwards
            rounds without scores, because no client replied, do not count.
    """

    best: Best | None = None
    improved: Best | None = None
    start: Mapping[str, ClientLoss] = field(default_factory=dict)
    measured: bool = False
    reported: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def add(self, metric: str, number: int, scores: ClientScores | None) -> Selection:
        """Return the selection after a further round."""
        if scores is None and self.measured:
            return self
        reported, deciding = self.reported, None if scores is None else scores.pooled
        if scores is not None and scores.trimmed is not None:
            latest = {id: {**self.reported.get(id, {}), **row} for id, row in scores.by_client.items()}
            reported = {**self.reported, **latest}
            deciding = replace(self, reported=reported).compute_deciding_means(metric)
            scores = None if deciding is None else replace(scores, by_client=reported, trimmed=deciding)
        rated = plain = rate_round(metric, number, deciding)
        start = self.start
        if metric == "loss" and scores is not None:
            start = _select_losses(scores) if number == 0 else start
            if start:
                gain = compute_gain(start, scores)
                bound = _WORST if gain is None else _to_finite(gain.mean - gain.standard_error)
                rated = plain._replace(score=bound if number else 0.0)
        best, improved = self.best, self.improved
        if scores is not None and not self.measured:
            best = improved = None  # rated by their numbers, which cannot be compared with scores
        noisy = scores is not None and scores.noisy
        if best is None or _compare(rated, best, noisy) >= 0:
            best = rated
        if improved is None or _compare(plain, improved, noisy) >= (0 if noisy else 1):
            improved = plain
        return Selection(best, improved, start, measured=scores is not None, reported=reported)

    def count_reporting(self, metric: str) -> int:
        """Return the number of clients that have reported the metric or the loss, whichever more have."""
        return max(sum(name in row for row in self.reported.values()) for name in (metric, "loss"))

    def compute_deciding_means(self, metric: str) -> dict[str, float] | None:
        """Compute the trimmed means that rate the last round, of the clients' last metrics.

        Returns:
            The means of the metric and the loss, as far as enough clients have reported them; None: neither.
        """
        names = [name for name in (metric, "loss") if sum(name in row for row in self.reported.values()) >= DECIDING]
        return compute_trimmed_means(self.reported, names) if names else None

    def to_json(self) -> dict[str, Any]:
        """Return the selection as JSON values."""
        start = {id: list(loss) for id, loss in self.start.items()}
        values = {"best": self.best, "improved": self.improved, "start": start, "measured": self.measured}
        return {**values, "reported": {id: dict(row) for id, row in self.reported.items()}}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Selection:
        """Build the selection from what ``to_json`` returned."""
        best, improved = (None if values[name] is None else Best(*values[name]) for name in ("best", "improved"))
        start = {id: ClientLoss(*loss) for id, loss in values["start"].items()}
        return cls(best, improved, start, bool(values["measured"]), values["reported"])


def has_stalled(config: RunConfig, number: int, improved: Best | None) -> bool:
    """Check whether early stopping ends a run after a round."""
    patience = config.federation.early_stopping
    if patience is None or improved is None or number % config.evaluation.every:
        return False
    return number - improved.round >= patience


def rate_round(metric: str, number: int, validation: Mapping[str, float] | None) -> Best:
    """Rate a round by its validation scores alone."""
    if validation is None:
        return Best(float(number), 0.0, number)
    return Best(_to_finite(compute_score(metric, validation)), _to_finite(compute_score("loss", validation)), number)


def compute_gain(start: Mapping[str, ClientLoss], scores: ClientScores) -> Gain | None:
    """Compute what a round's validation loss gains on the start; None if no client has both losses.

    The clients are the samples. Let d_i be the decrease of client i's loss, and w_i its share of the examples. The
    mean is sum_i w_i d_i, with the squared standard error sum_i w_i^2 (d_i - mean)^2 / (1 - sum_i w_i^2). If K clients
    measure their own losses, the c smallest and the c largest d_i are replaced by the next value, and the error of
    this winsorized mean is larger by (K - 1) / (K - 2 c - 1). ``count_trimmed_clients`` gives c for all clients that
    were measured before or after the round, so an absent client does not end the trimming. If only one client
    decides, the error is 1 % of the median loss of the start.
    """
    after = _select_losses(scores)
    ids = sorted(start.keys() & after.keys())
    if not ids:
        return None
    d = np.array([start[id].loss - after[id].loss for id in ids])
    w = np.array([after[id].examples for id in ids])
    w, count = w / w.sum(), len(ids)
    trimmed = 0 if scores.trimmed is None else count_trimmed_clients(len(start.keys() | after.keys()))
    cut = min(trimmed, (count - 1) // 2)
    if cut:
        order = np.sort(d)
        d = d.clip(order[cut], order[-cut - 1])
    mean = float(w @ d)
    spread, degrees_of_freedom = 1 - float(w @ w), count - 2 * cut - 1
    if degrees_of_freedom == 0 or spread < _LEAST_SPREAD:
        return Gain(mean, _MARGIN * float(np.median([abs(start[id].loss) for id in ids])))
    error = math.sqrt(float(w**2 @ (d - mean) ** 2) / spread)
    return Gain(mean, error * (count - 1) / degrees_of_freedom)


def _select_losses(scores: ClientScores) -> dict[str, ClientLoss]:
    """Return the losses that are finite, of clients with examples."""
    return {
        id: ClientLoss(row["loss"], row["examples"])
        for id, row in scores.by_client.items()
        if math.isfinite(row.get("loss", math.nan)) and row.get("examples", 0) > 0
    }


def _compare(first: Best, second: Best, noisy: bool) -> int:
    """Return 1 if the first round is better, -1 if it is worse, and 0 if both have the same score and loss."""
    tolerance = _TOLERANCE if noisy else 0.0
    for one, other in zip(first[:2], second[:2], strict=True):
        if not math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance):
            return 1 if one > other else -1
    return 0


def _to_finite(rank: float) -> float:
    """Return a rank as a finite number, as JSON requires; NaN is the worst."""
    return _WORST if math.isnan(rank) else min(max(_WORST, rank), -_WORST)
