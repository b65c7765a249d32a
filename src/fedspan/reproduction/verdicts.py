"""Verdicts on the paper's statements from a preset's results, by the rule that was fixed before they were measured."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fedspan.experiments.intervals import Within, compare_pairs, compare_to
from fedspan.experiments.tables import Table, format_mean
from fedspan.reports.curves import Point, compute_target, find_target_round
from fedspan.reproduction.cells import Cell
from fedspan.reproduction.presets import Claim
from fedspan.tasks.metrics import METRICS

ClaimVerdict = Literal["holds", "contradicted", "inconclusive", "not runnable here"]

COSTS: Mapping[str, Callable[[Point], float]] = {
    "rounds_to": lambda point: float(point.round),
    "bytes_to": lambda point: float(point.bytes),
    "seconds_to": lambda point: point.seconds,
}
"""Costs of reaching the score of both rows of a pair (``reports.curves.compute_target``), by seed; less is better."""
Bound = Literal["", "at least ", "at most ", "about "]
_SIGNS = {"exact_match": 1.0, "alignment": 1.0, "barrier": -1.0, "state_step": -1.0}
"""Direction of other measures: 1 if higher is better, -1 if lower is better."""


@dataclass(frozen=True)
class CellScore:
    """One row in one cell."""

    cell: str
    method: str
    selected: Mapping[str, object]
    """Values that the sweep selected, by path in the config; empty without a sweep."""
    metric: str
    """Metric that was measured; empty if nothing was."""
    higher: bool
    scores: tuple[float | None, ...]
    """Scores on held-out examples (without them, on the clients' own tests), one for each seed; empty on failure."""
    mean: float | None
    """Mean of the scores; None if one is missing."""
    deviation: float | None
    """Standard deviation (n - 1) over the seeds; None for one seed."""
    bytes_down: float | None
    """Serialized bytes to clients in one run, mean over the seeds."""
    bytes_up: float | None
    """Serialized bytes from clients in one run, mean over the seeds."""
    seconds: float | None
    """Wall-clock time of the rounds of one run, mean over the seeds."""
    failed: str | None = None
    """Why there are no scores; None if there are."""
    measured: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    """Values that claims compare besides scores and bytes, by measure, one for each seed."""
    curves: tuple[tuple[Point, ...], ...] = ()
    """Scores by round, one curve for each seed; empty if no claim needs them."""
    by_value: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    """Scores on the held-out examples of each value of ``evaluation.by``, one for each seed; empty without it."""


@dataclass(frozen=True)
class JudgedCell:
    """A claim in one cell, or over all of its cells."""

    cell: str
    """Name of the cell; ``all`` for all cells of the claim."""
    mean: float
    """Mean advantage of the better row over the seeds, in the metric's unit."""
    half_width: float | None
    """Half the width of the 95 % interval of the mean; None for one seed."""
    verdict: ClaimVerdict
    bound: Bound = ""
    """Bound on a mean of costs, if a run of the worse row (at least), of the better one (at most) or of both (about)
    ended before it reached the score: its whole cost is counted, which is less than reaching it takes."""


@dataclass(frozen=True)
class Judged:
    """A claim about one pair of rows, judged."""

    statement: str
    better: str
    worse: str
    metric: str
    verdict: ClaimVerdict
    """Verdict over all cells together, seed by seed."""
    overall: JudgedCell | None
    """The verdict over all cells with its numbers; None if the claim could not be judged."""
    cells: tuple[JudgedCell, ...]
    reason: str | None = None
    """Reason why the claim could not be judged; None if it was judged."""


def judge(claims: Sequence[Claim], cells: Sequence[Cell], scores: Sequence[CellScore]) -> tuple[Judged, ...]:
    """Judge every claim against every row that it names as worse.

    The verdict is *holds* if the 95 % interval of the difference, paired by seed, lies in the paper's direction,
    *contradicted* if it lies in the other direction, else *inconclusive*; ``claim.within`` is applied as in
    ``experiments.intervals.compare_to``. A cell in which a row failed is left out.
    """
    by_cell = {(score.cell, score.method): score for score in scores}
    return tuple(_judge_pair(claim, worse, cells, by_cell) for claim in claims for worse in claim.worse)


def _judge_pair(claim: Claim, worse: str, cells: Sequence[Cell], scores: Mapping[tuple[str, str], CellScore]) -> Judged:
    fitting = [cell for cell in cells if all(cell.values[axis] in names for axis, names in claim.cells.items())]
    named = {cell.name for cell in fitting}
    metrics = dict.fromkeys(s.metric for s in scores.values() if s.metric and s.cell in named)
    metric = claim.measure if claim.measure != "score" else next(iter(metrics), "")

    def skip(reason: str) -> Judged:
        return Judged(claim.statement, claim.better, worse, metric, "not runnable here", None, (), reason)

    if claim.needs is not None:
        return skip(f"it takes {claim.needs}, which is not measured")
    if claim.measure == "score" and len(metrics) > 1:
        return skip(f"{' and '.join(sorted(metrics))} have no mean: a claim for each")
    pairs: dict[str, tuple[list[float], list[float]]] = {}
    bounds: dict[str, Bound] = {}
    for cell in fitting:
        if claim.measure in COSTS:
            rows = (scores.get((cell.name, claim.better)), scores.get((cell.name, worse)))
            *pair, bounds[cell.name] = _get_costs(COSTS[claim.measure], *rows)
        else:
            pair = [_get_values(claim, cell, label, cells, scores) for label in (claim.better, worse)]
        if pair[0] is not None and pair[1] is not None:
            pairs[cell.name] = (pair[0], pair[1])
    if not pairs:
        return skip("no cell of the claim was run or measured at this scale, or one of its rows failed in every cell")
    rule = _describe_rule(claim)
    single = tuple(_judge_cell(name, rule(*pair), bounds.get(name, "")) for name, pair in pairs.items())
    columns = [zip(*[pair[side] for pair in pairs.values()], strict=True) for side in (0, 1)]
    mean = [[sum(column) / len(column) for column in side] for side in columns]
    overall = _judge_cell("all", rule(mean[0], mean[1]), _compute_bound({bounds.get(name, "") for name in pairs}))
    return Judged(claim.statement, claim.better, worse, metric, overall.verdict, overall, single)


def _describe_rule(claim: Claim) -> Callable[[Sequence[float], Sequence[float]], Within]:
    within = claim.within
    if within is None:
        return compare_pairs
    return lambda better, worse: compare_to(
        [above - other for above, other in zip(better, worse, strict=True)], 0.0, within
    )


def _judge_cell(name: str, result: Within, bound: Bound) -> JudgedCell:
    """Judge a cell; a bound on the wrong side is inconclusive: a run that missed the score may have been cheaper."""
    is_inconclusive = (result.verdict == "holds" and bound in ("at most ", "about ")) or (
        result.verdict == "contradicted" and bound in ("at least ", "about ")
    )
    verdict = "inconclusive" if is_inconclusive else result.verdict
    half = result.half_width if result.half_width < float("inf") else None
    return JudgedCell(name, result.mean, half, verdict, bound)


def _compute_bound(bounds: Collection[Bound]) -> Bound:
    distinct: set[Bound] = set(bounds) - {""}
    return "about " if len(distinct) > 1 else distinct.pop() if distinct else ""


def _get_values(
    claim: Claim, cell: Cell, label: str, cells: Sequence[Cell], scores: Mapping[tuple[str, str], CellScore]
) -> list[float] | None:
    """Return the compared values, one for each seed, so that more is better; None if something is missing."""
    if claim.gap is None:
        return _orient(scores.get((cell.name, label)), claim.measure)
    gap = claim.gap
    if cell.values[gap.axis] != gap.after:
        return None
    other = {**cell.values, gap.axis: gap.before}
    before = next((c for c in cells if c.values == other), None)
    values = [_orient(scores.get((c.name, label)), claim.measure) for c in (before, cell) if c is not None]
    if len(values) < 2 or values[0] is None or values[1] is None:
        return None
    return [end - start for start, end in zip(values[0], values[1], strict=True)]


def _get_costs(
    cost: Callable[[Point], float], better: CellScore | None, worse: CellScore | None
) -> tuple[list[float] | None, list[float] | None, Bound]:
    """Return the negated costs of reaching the pair's score for both rows, one for each seed, and the bound."""
    costs: tuple[list[float], list[float]] = ([], [])
    bounds: set[Bound] = set()
    for pair in zip(() if better is None else better.curves, () if worse is None else worse.curves, strict=False):
        assert better is not None
        target = compute_target(pair, better.higher)
        if target is None:
            return None, None, ""
        bounds_of_pair: tuple[Bound, Bound] = ("at most ", "at least ")
        for row_cost, curve, bound in zip(costs, pair, bounds_of_pair, strict=True):
            point = find_target_round(curve, target, better.higher)
            row_cost.append(-cost(point or curve[-1]))
            bounds |= {bound} if point is None else set()
    return costs[0] or None, costs[1] or None, _compute_bound(bounds)


def _orient(score: CellScore | None, measure: str) -> list[float] | None:
    if score is None or score.mean is None:
        return None
    if measure in _SIGNS:
        measured = [value for value in score.measured.get(measure, ()) if value is not None]
        return [_SIGNS[measure] * value for value in measured] if len(measured) == len(score.scores) else None
    if measure != "score":
        count = score.bytes_up if measure == "bytes_up" else score.bytes_down
        return None if count is None else [-count] * len(score.scores)
    sign = 1.0 if score.higher else -1.0
    return [sign * value for value in score.scores if value is not None]


def tabulate_verdicts(judged: Sequence[Judged]) -> Table:
    """Tabulate the verdicts for people to read."""
    rows = tuple(
        (
            judgment.statement,
            f"{judgment.better} over {judgment.worse}",
            "-" if judgment.overall is None else format_difference(judgment.metric, judgment.overall),
            f"{sum(cell.verdict == 'holds' for cell in judgment.cells)} of {len(judgment.cells)}"
            if judgment.cells
            else "-",
            judgment.verdict if judgment.reason is None else f"{judgment.verdict}: {judgment.reason}",
        )
        for judgment in judged
    )
    notes = (
        "± is half the 95 % interval of the difference over all cells, paired by seed (Student's t). Holds: the "
        "interval lies in the paper's direction; contradicted: in the other; else inconclusive.",
    )
    return Table(
        ("the paper's statement", "rows", "better by", "cells in which it holds", "verdict"), rows, None, notes
    )


def format_difference(metric: str, cell: JudgedCell) -> str:
    """Format the advantage of the better row with its unit: positive in the paper's direction."""
    if metric in ("bytes_up", "bytes_down"):
        return f"{cell.mean / 1e6:+.3f} MB"
    if metric == "bytes_to":
        half = "" if cell.half_width is None else f" ± {cell.half_width / 1e6:.3f}"
        return f"{cell.bound}{cell.mean / 1e6:+.3f}{half} MB"
    if metric in ("rounds_to", "seconds_to"):
        half = "" if cell.half_width is None else f" ± {cell.half_width:.1f}"
        return f"{cell.bound}{cell.mean:+.1f}{half} {metric.removesuffix('_to')}"
    if metric in _SIGNS and metric not in METRICS:
        return f"{cell.mean:+.3g}" + ("" if cell.half_width is None else f" ± {cell.half_width:.2g}")
    return format_mean(metric, cell.mean, cell.half_width, sign=True)
