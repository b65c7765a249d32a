"""Warnings from a finished run's metrics: failures by client, signs of divergence, and limited clients."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from statistics import mean
from typing import TYPE_CHECKING, Any, cast

from fedspan.tasks.metrics import METRICS, compute_score

if TYPE_CHECKING:
    from fedspan.federation.progress import Failure


_LOSS_NOISE = 0.01  # relative difference of losses that other batches and seeds have, too
_CLEAR_FALL = 0.1  # relative; the share of right ones among a few examples varies
_PARTS = {"validation": "validation", "test": "test", "clients": "the clients' test"}
"""Kinds of scores in a row, the first that a run has decides, and their names."""
_SMALL = 0.1  # share of the untrained model's loss below which a training loss is small, however much it rose
_RISE = 2.0  # a training loss of one round varies with its cohort, but rarely by this factor
_RISE_OVER_START = 4.0  # a round's first steps, and other examples than those of the validation loss, count too
_OFTEN = 0.5
"""Share of a client's rounds beyond which its changes are named."""
_ROUNDS = 3
"""Rounds that a client's changes must have been limited in to be named."""


def count_failures(
    rows: Iterable[Mapping[str, object]], last: int = 0, more: Iterable[Failure] = ()
) -> dict[str, dict[str, Any]]:
    """Count the failures by client, sorted by client id.

    Args:
        rows: Lines of metrics.jsonl; entries that are not failures as a run writes them are ignored.
        last: The round that was evaluated and exported at the end of the run.

    Returns:
        By client id, ``count``, and the ``round`` and ``reason`` of its last failure.
    """
    counts_by_client: dict[str, dict[str, Any]] = {}
    for row in rows:
        failures = row.get("failures")
        for failure in cast(list[object], failures) if isinstance(failures, list) else ():
            match failure:
                case {"client": str() as client, "reason": str() as reason}:
                    _count(counts_by_client, client, row.get("round"), reason)
                case _:
                    continue
    for failure in more:
        _count(counts_by_client, failure.client, last, failure.reason)
    return dict(sorted(counts_by_client.items()))


def _count(failures: dict[str, dict[str, Any]], client: str, round: object, reason: str) -> None:
    count = failures[client]["count"] if client in failures else 0
    failures[client] = {"count": count + 1, "round": round, "reason": reason}


def find_divergence(
    rows: Iterable[Mapping[str, Any]],
    metric: str,
    lr: float,
    guess: float | None = None,
    start: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[str, ...]:
    """Find signs of divergence in a run's metrics.

    The last round's training loss is compared with the first round's, unless both are small, and with the untrained
    model's: the larger of its measured loss and the loss of a guess, as far as they are known. The last round's scores
    are compared with the untrained model's, where it was measured, and with the first ones of the rounds: scores of
    validation or, without them, of the held-out set or of the clients' test parts.

    Args:
        guess: Loss of a model that guesses (``compute_guess_loss``); None: unknown.
        start: Scores of the untrained model, where no row has them: ``validation``, ``test`` or ``clients``.

    Returns:
        Sentences for the user; empty if there is no sign.
    """
    rounds = list(rows)
    references = 1
    if start and not any(row["round"] == 0 and row.keys() & _PARTS.keys() for row in rounds):
        untrained_row: dict[str, Any] = {"round": 0, **start}
        rounds = [untrained_row, *(row for row in rounds if row["round"])]
        references = 2  # the first round's scores, too: the untrained model's may be those of a guess
    advice = f"Lower training.lr (now {lr:g}) or set training.max_grad_norm."
    notes: list[str] = []
    part = next((part for part in _PARTS if any(row["round"] and row.get(part) for row in rounds)), "validation")
    scored = [(int(row["round"]), _select_finite(row[part])) for row in rounds if row.get(part)]
    # no loss: the clients keep theirs to themselves, as data owners' nodes do
    trained = [row for row in rounds if row.get("cohort") and row.get("loss") is not None]
    losses = [(int(row["round"]), float(row["loss"])) for row in trained]
    if losses:
        (first, before), (last, after) = losses[0], losses[-1]
        measured = scored[0][1].get("loss") if scored and not scored[0][0] else None
        # a multiple of a good model's loss is no sign yet, so the loss of a guess counts, too
        untrained = max((loss for loss in (measured, guess) if loss is not None), default=None)
        limit = math.inf if untrained is None else _RISE_OVER_START * untrained
        floor = _SMALL * untrained if untrained is not None and math.isfinite(untrained) else 0.0
        if not math.isfinite(after) or (after > _RISE * max(before, 0.0) > 0 and after > floor):
            notes.append(
                f"Training diverged: the training loss rose from {before:.4g} in round {first} to {after:.4g} in round "
                f"{last}. {advice}"
            )
        elif untrained is not None and after > limit:
            notes.append(
                f"Training diverged: the training loss is {after:.4g} in round {last}, and that of the untrained model "
                f"{untrained:.4g}. {advice}"
            )
    for first, before in scored[:references]:
        last, after = scored[-1]
        if _is_worse(metric, before, after):
            texts = [_format_scores(metric, scores) for scores in (before, after)]
            when = f"after round {first}" if first else "before training"
            notes.append(
                f"Training made the model worse: {_PARTS[part]} {METRICS[metric].title} was {texts[0]} {when} and is "
                f"{texts[1]} after round {last}. {advice}"
            )
            break
    return tuple(notes)


def _is_worse(metric: str, before: Mapping[str, float], after: Mapping[str, float]) -> bool:
    """Check whether the metric became worse and the loss rose; without losses, whether the metric fell clearly."""
    rank, first_rank = compute_score(metric, after), compute_score(metric, before)
    if "loss" not in before:
        return rank < first_rank - _CLEAR_FALL * abs(first_rank)
    return rank < first_rank and not after.get("loss", math.nan) <= (1 + _LOSS_NOISE) * before["loss"]


def _select_finite(scores: Mapping[str, float | None]) -> dict[str, float]:
    """Return the scores that have a value; JSON has none for numbers that are not finite."""
    return {name: value for name, value in scores.items() if value is not None}


def _format_scores(metric: str, scores: Mapping[str, float]) -> str:
    value = scores.get(metric)
    return "undefined" if value is None else f"{value:.1%}" if METRICS[metric].is_percentage else f"{value:.4g}"


def find_limited(rows: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Find clients whose changes were scaled down in more than half of their rounds, or whose weight was lowered.

    Returns:
        Sentences for the user, by client.
    """
    selected, lowered, factors = Counter[str](), Counter[str](), defaultdict[str, list[float]](list)
    for row in rows:
        selected.update(row.get("cohort", ()))
        for id, factor in row.get("clipped", {}).items():
            factors[id].append(factor)
        lowered.update(list(row.get("lowered_weights", ())))
    changes = tuple(
        f"The changes of {id} were scaled down in {len(client_factors)} of its {selected[id]} rounds, "
        f"to {mean(client_factors):.0%} on average (federation.clip_ratio): it has more examples, other data or "
        "another training than most clients, or it is hostile."
        for id, client_factors in sorted(factors.items())
        if len(client_factors) >= _ROUNDS and len(client_factors) > _OFTEN * selected[id]
    )
    weights = tuple(
        f"The weight of {id} was lowered in {count} of its {selected[id]} rounds: it declares more examples than it "
        "was admitted with, or many more than the median client (federation.max_weight_ratio)."
        for id, count in sorted(lowered.items())
    )
    return changes + weights
