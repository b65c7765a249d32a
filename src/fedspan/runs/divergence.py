"""Signs that training diverged or made the model worse, for a run's report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from fedspan.tasks.metrics import METRICS, compute_score

__all__ = ["find_divergence"]

_RISE = 2.0  # a training loss of one round varies with its cohort, but rarely by this factor
_RISE_OVER_START = 4.0  # a round's first steps, and other examples than those of the validation loss, count too


def find_divergence(rows: Iterable[Mapping[str, Any]], metric: str, lr: float, classes: int = 0) -> tuple[str, ...]:
    """Find signs of divergence in a run's metrics.

    The last round's training loss is compared with the first round's, and with the model's before training: the
    larger of its validation loss, where that was measured, and, of classes, of the loss of equal probabilities.

    Args:
        rows: Lines of metrics.jsonl.
        metric: The metric that compares rounds.
        lr: Peak learning rate of the run, for the advice.
        classes: Number of classes, of which each example has one; 0: the loss is another one.

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
        elif (start := _find_start_loss(rounds, classes)) is not None and after > _RISE_OVER_START * start:
            notes.append(
                f"Training diverged: the training loss is {after:.4g} in round {last}, and that of the untrained model "
                f"{start:.4g}. {advice}"
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


def _find_start_loss(rows: Iterable[Mapping[str, Any]], classes: int) -> float | None:
    validation = next((row.get("validation") for row in rows if row["round"] == 0), None) or {}
    measured = validation.get("loss")
    losses = [measured] if measured is not None and math.isfinite(measured) else []
    losses += [math.log(classes)] if classes > 1 else []  # of a model that was good before, a multiple is no sign yet
    return max(losses, default=None)


def _select_finite(scores: Mapping[str, float | None]) -> dict[str, float]:
    """Return the scores that have a value; JSON has none for numbers that are not finite."""
    return {name: value for name, value in scores.items() if value is not None}


def _format_scores(metric: str, scores: Mapping[str, float]) -> str:
    value = scores.get(metric)
    return "undefined" if value is None else f"{value:.1%}" if METRICS[metric].is_percentage else f"{value:.4g}"
