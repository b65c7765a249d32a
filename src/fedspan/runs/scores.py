"""The scores of a progress, as a report holds them."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedspan.engines.evaluation import ClientScores
from fedspan.engines.federation import Progress
from fedspan.runs.build import Prepared

__all__ = ["client_summary", "final_scores"]


def client_summary(own: ClientScores) -> dict[str, Any]:
    """Plain means over clients, and the worst client."""
    worst, accuracy = own.worst()
    return {
        "accuracy": own.mean("accuracy"),
        "macro_f1": own.mean("macro_f1"),
        "worst": {"client": worst, "accuracy": accuracy},
    }


def final_scores(prepared: Prepared, progress: Progress) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    """Final scores: on the held-out set and on the clients' own test parts."""
    scores: dict[str, Any] = {}
    validation, own = prepared.evaluator.clients(progress)
    if validation is not None:
        scores["validation"] = dict(validation.pooled)
    if own is not None:
        scores["clients"] = client_summary(own)
    if prepared.test is not None:
        heldout = prepared.evaluator.heldout(progress, prepared.test)
        worst = min(heldout, key=lambda id: heldout[id]["accuracy"])
        metrics = next(iter(heldout.values()))
        means: dict[str, Any] = {key: float(np.mean([row[key] for row in heldout.values()])) for key in metrics}
        if len(heldout) > 1:
            means["worst"] = {"client": worst, "accuracy": heldout[worst]["accuracy"]}
        scores["test"] = means
    return scores, {} if own is None else {id: dict(row) for id, row in own.by_client.items()}
