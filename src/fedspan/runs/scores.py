"""The scores of a progress, as a report holds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedspan.engines.evaluation import summarised
from fedspan.engines.federation import Progress
from fedspan.runs.build import Prepared
from fedspan.tasks.metrics import rank_of

__all__ = ["final_scores", "round_score"]

_WORST = -1e308


def round_score(prepared: Prepared, number: int, validation: Mapping[str, float] | None) -> float:
    """By which rounds are compared; larger is better. Without validation parts the last evaluated round is the best."""
    if validation is None:
        return float(number)
    return max(_WORST, rank_of(prepared.task.metric, validation))  # finite, as JSON wants it


def final_scores(prepared: Prepared, progress: Progress) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    """Final scores: on the held-out set and on the clients' own test parts."""
    metric, scores = prepared.task.metric, dict[str, Any]()
    validation, own = prepared.evaluator.clients(progress)
    if validation is not None:
        scores["validation"] = dict(validation.pooled)
    if own is not None:
        scores["clients"] = own.summary(metric)
    if prepared.test is not None:
        heldout = prepared.evaluator.heldout(progress, prepared.test, thorough=prepared.config.evaluation.generate)
        scores["test"] = summarised(heldout, metric)
        if len(heldout) == 1:
            del scores["test"]["worst"]
    return scores, {} if own is None else {id: dict(row) for id, row in own.by_client.items()}
