"""The score of a run by round, its cumulative cost, and the cost of reaching a target score."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

from fedspan.logs import read_lines
from fedspan.run_folder import RunFolder
from fedspan.runs.ledger import Totals, read_totals

SHARE = 0.9
"""Target score, as a share of the distance from the worst first score to the best score."""


@dataclass(frozen=True)
class Point:
    """One evaluated round.

    Args:
        round: Number of the round, counted from 1; 0: the start.
        score: Score on held-out examples; without them, the mean over the clients' own test parts.
        bytes: Cumulative bytes of the training messages in both directions, as sent.
    """

    round: int
    score: float
    bytes: int
    seconds: float


def read_curve(run_folder: RunFolder, metric: str) -> tuple[Point, ...]:
    """Return the rounds of a run that have a score, ascending."""
    rows = cast("Sequence[Mapping[str, Any]]", list(read_lines(run_folder.metrics)))
    last = int(rows[-1]["round"]) if rows else 0
    sent, points = compute_sent_bytes(read_totals(run_folder.ledger), last), list[Point]()
    for row in rows:
        if (score := get_score(row, metric)) is not None:
            number = int(row["round"])
            points.append(Point(number, score, sent[number], float(row.get("seconds", math.nan))))
    return tuple(points)


def get_score(scores: Mapping[str, Any], metric: str) -> float | None:
    """Return the score in a line of metrics or a report: held-out, else the mean over the clients' own test parts."""
    part = scores.get("test") or scores.get("clients")
    score = part.get(metric) if isinstance(part, Mapping) else None
    if not isinstance(score, int | float):
        return None
    try:
        value = float(score)
    except OverflowError:  # an integer beyond the largest float
        return None
    return value if math.isfinite(value) else None


def compute_sent_bytes(totals: Totals, rounds: int) -> list[int]:
    """Return the cumulative bytes of the training messages, both directions, at the start and after each round."""
    each = (
        totals.count_round("down", round).bytes + totals.count_round("up", round).bytes
        for round in range(1, rounds + 1)
    )
    return list(accumulate(each, initial=0))


def compute_target(curves: Sequence[Sequence[Point]], higher: bool) -> float | None:
    """Compute the target score of several runs: nine tenths of the way from the worst first score to the best score.

    The best score that all runs reach is no useful target: if one run learns nothing, it is the score of an untrained
    model, and every run reaches it at once.

    Returns:
        The target score; None if a run has no score at all.
    """
    if not all(curves):
        return None
    worst, best = (min, max) if higher else (max, min)
    worst_start = worst(curve[0].score for curve in curves)
    return worst_start + SHARE * (best(point.score for curve in curves for point in curve) - worst_start)


def find_target_round(curve: Sequence[Point], target: float, higher: bool) -> Point | None:
    """Return the first round that reaches the target score; None if no round does."""
    return next((point for point in curve if (point.score >= target if higher else point.score <= target)), None)
