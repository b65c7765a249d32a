"""A run's score by round, with what it had cost by then, and the cost of reaching a score."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

from fedspan.runs.folder import RunFolder
from fedspan.runs.ledger import Totals, read_lines, read_totals

__all__ = ["Point", "curve_of", "reached", "score_of", "sent_until", "target_of"]

SHARE = 0.9
"""Of the way from the worst first score to the best score: what runs are timed to."""


@dataclass(frozen=True)
class Point:
    """A round that was evaluated.

    Args:
        round: counted from 1.
        score: on held-out examples; without them, the mean over the clients' own tests.
        bytes: of the training's messages until then, both ways, as sent.
        seconds: of wall-clock time in rounds until then.
    """

    round: int
    score: float
    bytes: int
    seconds: float


def curve_of(place: RunFolder, metric: str) -> tuple[Point, ...]:
    """The rounds of a run that have a score, ascending."""
    rows = cast("Sequence[Mapping[str, Any]]", list(read_lines(place.metrics)))
    sent, points = sent_until(read_totals(place.ledger), len(rows)), list[Point]()
    for number, row in enumerate(rows, 1):
        if (score := score_of(row, metric)) is not None:
            points.append(Point(number, score, sent[number - 1], float(row.get("seconds", math.nan))))
    return tuple(points)


def score_of(scores: Mapping[str, Any], metric: str) -> float | None:
    """On held-out examples, else the mean over the clients' own tests; of a line of metrics or a report's scores."""
    found = (scores.get("test") or scores.get("clients") or {}).get(metric)
    return float(found) if isinstance(found, int | float) and math.isfinite(found) else None


def sent_until(totals: Totals, rounds: int) -> list[int]:
    """Bytes of the training's messages, both ways, until the end of each of the first rounds."""
    each = (totals.round("down", round).bytes + totals.round("up", round).bytes for round in range(1, rounds + 1))
    return list(accumulate(each))


def target_of(curves: Sequence[Sequence[Point]], higher: bool) -> float | None:
    """What some runs are timed to: nine tenths of the way from the worst of their first scores to the best of all.

    Not the best score that all of them come to: where one of them learns nothing, that is what an untrained model has,
    and everything is there at once.

    Args:
        curves: of the runs.
        higher: whether more is better.

    Returns:
        The score; None if a run has none at all.
    """
    if not all(curves):
        return None
    worst, best = (min, max) if higher else (max, min)
    begun = worst(curve[0].score for curve in curves)
    return begun + SHARE * (best(point.score for curve in curves for point in curve) - begun)


def reached(curve: Sequence[Point], target: float, higher: bool) -> Point | None:
    """The first round with such a score; None if there is none."""
    return next((point for point in curve if (point.score >= target if higher else point.score <= target)), None)
