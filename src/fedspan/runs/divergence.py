"""Signs that training diverged or made the model worse, for a run's report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from fedspan.tasks.metrics import METRICS, compute_score

__all__ = ["find_divergence"]

_RISE = 2.0  # a training loss of one round varies with its cohort, but rarely by this factor


def find_divergence(rows: Iterable[Mapping[str, Any]], metric: str, lr: float) -> tuple[str, ...]:
    """Find signs of divergence in a run's metrics.

    Args:
        rows: Lines of metrics.jsonl.
        metric: The metric that compares rounds.
        lr: Peak learning rate of the run, for the advice.

    Returns:
        Sentences for the user; empty if there is no sign.
    """
    rounds = list(rows)
    advice = f"Lower training.lr (now {lr:g}) or set training.max_grad_norm."
    notes: list[str] = []
    # no loss: the clients keep theirs to themselves, under local privacy
    trained = [row for row in rounds if row.get("cohort") and row.get("loss") is not None]
    losses = [(int(row["round"]), float(row["loss"])) for row in trained]
    if losses:
        (first, before), (last, after) = losses[0], losses[-1]
        if not math.isfinite(after) or after > _RISE * max(before, 0.0) > 0:
            notes.append(
                f"Training diverged: the training loss rose from {before:.4g} in round {first} to {after:.4g} in round "
                f"{last}. {advice}"
            )
    scored = [(int(row["round"]), _select_finite(row["validation"])) for row in rounds if row.get("validation")]
    if scored:
        (first, before), (last, after) = scored[0], scored[-1]
        if compute_score(metric, after) < compute_score(metric, before) and not compute_score(
            "loss", after
        ) >= compute_score("loss", before):
            texts = [_format_scores(metric, scores) for scores in (before, after)]
            notes.append(
                f"Training made the model worse: validation {METRICS[metric].title} was {texts[0]} after round {first} "
                f"and is {texts[1]} after round {last}. {advice}"
            )
    return tuple(notes)


def _select_finite(scores: Mapping[str, float | None]) -> dict[str, float]:
    """Return the scores that have a value; JSON has none for numbers that are not finite."""
    return {name: value for name, value in scores.items() if value is not None}


def _format_scores(metric: str, scores: Mapping[str, float]) -> str:
    value = scores.get(metric)
    return "undefined" if value is None else f"{value:.1%}" if METRICS[metric].is_percentage else f"{value:.4g}"
