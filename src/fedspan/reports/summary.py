"""Summary of the results in one paragraph; every sentence follows from the data."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedspan.experiments.intervals import Difference, estimate_difference, format_gap
from fedspan.experiments.tables import compute_majority, describe_extension, describe_majority, format_mean
from fedspan.progress.formatting import format_size
from fedspan.reports.groups import RunGroup
from fedspan.runs.report import STATISTICS_NOTE, format_final_rounds
from fedspan.tasks.metrics import METRICS


def format_score_with_unit(metric: str, value: float | None, deviation: float | None = None) -> str:
    """Format a score as ``84.2 %``, ``84.2 ± 0.3 %`` or ``0.1234``; a dash for a score that was not measured."""
    unit = " %" if value is not None and METRICS[metric].is_percentage else ""
    return f"{format_mean(metric, value, deviation)}{unit}"


def write_sentences(groups: Sequence[RunGroup]) -> tuple[str, ...]:
    """Write the verdict."""
    metric = groups[0].runs[0].metric
    measured = [group for group in groups if group.mean is not None]
    if not measured:
        return ("Nothing was measured on held-out examples yet.",)
    sign = 1 if METRICS[metric].greater_is_better else -1
    ranked = sorted(measured, key=lambda group: -sign * (group.mean or 0.0))
    return tuple(
        sentence
        for sentence in (
            _describe_best(ranked, metric),
            _compare_start(ranked[0], metric),
            _describe_baselines(ranked[0], metric),
            _compare_client_means(ranked[0], metric),
            f"It is {_compare_groups(ranked[0], ranked[1], metric)}." if len(ranked) > 1 else "",
            _describe_savings(ranked, metric),
            _describe_worst_clients(ranked[0], metric, sign),
            _describe_failures(groups),
        )
        if sentence
    )


def write_notes(groups: Sequence[RunGroup]) -> tuple[str, ...]:
    """Write the lines beside the verdict: of the majority class, and of runs that still improve."""
    runs = [run for group in groups for run in group.runs]
    majority = next((note for run in runs if (note := describe_majority(run.metric, run.read_items()))), "")
    extensions = [describe_extension(run.report, run.folder) for run in runs if run.report is not None]
    return tuple(filter(None, (majority, *extensions)))


def _describe_best(ranked: Sequence[RunGroup], metric: str) -> str:
    best = ranked[0]
    majority = compute_majority(metric, best.runs[0].read_items())
    seeds = f" (mean of {len(best.runs)} seeds)" if len(best.runs) > 1 else " (one seed)"
    title = METRICS[metric].title
    first = f"{best.label} has the best {title}," if len(ranked) > 1 else f"The {title} of {best.label} is"
    score = format_score_with_unit(metric, best.mean, best.deviation)
    if majority is not None and best.mean is not None and best.mean < majority:
        score += f", below the majority class ({format_score_with_unit(metric, majority)})"
    return f"{first} {score}{seeds}, {_describe_rounds(best)}."


def _describe_rounds(group: RunGroup) -> str:
    counts = sorted({run.rounds for run in group.runs})
    rounds = f"{counts[0]} rounds" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} rounds"
    is_selected = all(run.report is not None and run.report.selected for run in group.runs)
    counts = sorted({run.report.final_rounds for run in group.runs if run.report is not None})
    final = f" and {format_final_rounds(counts[-1])}" if counts and counts[-1] else ""
    return f"at the best of {rounds} by validation{final}" if is_selected else f"after {rounds}"


def _compare_start(best: RunGroup, metric: str) -> str:
    start = best.references.get("start")
    if best.mean is None or start is None:
        return ""
    change = _compare_with_reference(best, "start", metric).describe(metric, "the start")
    sentence = f"Before the first round it was {format_score_with_unit(metric, start)}; the result is {change}."
    is_simulated = any(run.rows and run.rows[0].get("simulated") for run in best.runs)
    return f"{sentence} {STATISTICS_NOTE}" if is_simulated else sentence


def _describe_baselines(best: RunGroup, metric: str) -> str:
    titles = {"local-only": "Local-only training (mean client)", "centralized": "Centralized training"}
    return " ".join(
        f"{title} reached {format_score_with_unit(metric, best.references[name])}; "
        f"the result is {_compare_with_reference(best, name, metric).describe(metric, 'it')}."
        for name, title in titles.items()
        if name in best.references
    )


def _compare_with_reference(group: RunGroup, name: str, metric: str) -> Difference:
    """Compare a group's results with the start or a baseline, which all of its runs have."""
    others = [_replace_none(run.score(run.references[name])) for run in group.runs]
    pairs = [
        None if (items := run.read_items()) is None or (other := run.read_items(name)) is None else (items, other)
        for run in group.runs
    ]
    return estimate_difference(metric, [_replace_none(score) for score in group.scores], others, pairs)


def _replace_none(score: float | None) -> float:
    return math.nan if score is None else score


def _compare_groups(first: RunGroup, second: RunGroup, metric: str) -> str:
    """Describe the difference of two groups' results, with an interval if they have the same seeds."""
    scores = [[_replace_none(score) for score in group.scores] for group in (first, second)]
    if [run.config.seed for run in first.runs] != [run.config.seed for run in second.runs]:
        gap = format_gap(metric, _replace_none(first.mean) - _replace_none(second.mean))
        return f"{gap} from {second.label}, without an interval because their seeds differ"
    pairs = [
        None if (items := run.read_items()) is None or (theirs := other.read_items()) is None else (items, theirs)
        for run, other in zip(first.runs, second.runs, strict=True)
    ]
    return estimate_difference(metric, scores[0], scores[1], pairs).describe(metric, second.label)


def _compare_client_means(best: RunGroup, metric: str) -> str:
    """Compare the clients' mean on their own tests, where the scores above are those of held-out examples."""
    means = best.client_means
    result = means.get("result")
    if result is None or result == best.mean:
        return ""
    titles = {
        "start": "before the first round",
        "local-only": "with local-only training",
        "centralized": "with centralized training",
    }
    others = [
        f"{format_score_with_unit(metric, means[name])} {title}" for name, title in titles.items() if name in means
    ]
    compared = f" ({', '.join(others)})" if others else ""
    return f"On their own tests, the clients' mean is {format_score_with_unit(metric, result)}{compared}."


def _describe_savings(ranked: Sequence[RunGroup], metric: str) -> str:
    if len(ranked) < 2:
        return ""

    def count_bytes(group: RunGroup) -> float:
        return sum(run.bytes for run in group.runs) / len(group.runs)

    best, smallest = ranked[0], min(ranked, key=count_bytes)
    if smallest is best or not count_bytes(smallest):
        return f"It also sends the least, {format_size(count_bytes(best))} a run."
    times = count_bytes(best) / count_bytes(smallest)
    saving = f"{1 - 1 / times:.0%} less" if times < 2 else f"{times:.1f} times less"
    compared = _compare_groups(smallest, best, metric)
    return (
        f"{smallest.label} sends the least, {format_size(count_bytes(smallest))} a run ({saving}), and is {compared}."
    )


def _describe_worst_clients(best: RunGroup, metric: str, sign: int) -> str:
    worst: list[tuple[float, str]] = []
    for run in best.runs:
        scores = {
            id: float(client_scores[metric])
            for id, client_scores in (run.report.by_client if run.report is not None else {}).items()
            if metric in client_scores and not math.isnan(float(client_scores[metric]))
        }
        if len(scores) < 2:
            continue
        mean = sum(scores.values()) / len(scores)
        id = min(scores, key=lambda candidate: sign * scores[candidate])
        worst.append((sign * (mean - scores[id]), id))
    if not worst:
        return ""
    gap, id = max(worst)
    return f"The worst client, {id}, is {format_gap(metric, gap)} {'below' if sign > 0 else 'above'} the clients' mean."


def _describe_failures(groups: Sequence[RunGroup]) -> str:
    counts: dict[str, int] = {}
    for run in (run for group in groups for run in group.runs if run.report is not None):
        assert run.report is not None
        for id, failure in run.report.failures.items():
            counts[id] = counts.get(id, 0) + int(failure.get("count", 0))
    if not counts:
        return ""
    worst = max(counts, key=lambda id: counts[id])
    return f"{sum(counts.values())} replies did not count, {counts[worst]} of them {worst}'s."
