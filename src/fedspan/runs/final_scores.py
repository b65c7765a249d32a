"""Scores of a run's final models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fedspan.assembly.run import Prepared
from fedspan.federation.evaluation import summarize
from fedspan.federation.progress import Progress


@dataclass(frozen=True)
class FinalScores:
    """Scores of a run's final models.

    Args:
        scores: Scores by part, as in ``RunReport``.
        by_client: Metrics on each client's own test part.
        by_value: Metrics on the held-out examples of each value of ``evaluation.by``.
    """

    scores: dict[str, Any]
    by_client: dict[str, dict[str, float]]
    by_value: dict[str, dict[str, Any]]


def compute_final_scores(
    prepared: Prepared, progress: Progress, on_predictions: Callable[[Tensor], None] | None = None
) -> FinalScores:
    """Compute the final scores: on the held-out set and on the clients' own test parts.

    Args:
        prepared: The run.
        progress: The progress that holds the models.
        on_predictions: Called with each model's predictions of the held-out set.
    """
    metric, scores = prepared.task.metric, dict[str, Any]()
    by_value: dict[str, dict[str, Any]] = {}
    validation, test_scores = prepared.evaluator.evaluate_clients(progress)
    if validation is not None:
        scores["validation"] = dict(validation.pooled)
    if test_scores is not None:
        scores["clients"] = test_scores.summarize(metric)
    if prepared.test is not None:
        parts = [np.arange(len(prepared.test)), *prepared.test_parts.values()]
        heldout, *parted = prepared.evaluator.evaluate_parts(
            progress,
            prepared.test,
            parts,
            generate=prepared.config.evaluation.generate,
            on_predictions=on_predictions,
        )
        scores["test"] = _summarize_heldout(heldout, metric)
        by_value = {
            value: {**_summarize_heldout(part, metric), "examples": float(len(rows))}
            for (value, rows), part in zip(prepared.test_parts.items(), parted, strict=True)
        }
    by_client = {} if test_scores is None else {id: dict(row) for id, row in test_scores.by_client.items()}
    return FinalScores(scores, by_client, by_value)


def _summarize_heldout(heldout: Mapping[str, Mapping[str, float]], metric: str) -> dict[str, Any]:
    summary = summarize(heldout, metric)
    if len(heldout) == 1:
        summary.pop("worst", None)  # a metric that is undefined on the set has none
    return summary


def sample_predictions(prepared: Prepared, progress: Progress, count: int = 3) -> tuple[dict[str, str], ...]:
    """Predict a few held-out texts, spread over the set, with the first model."""
    if prepared.test is None:
        return ()
    indices = np.unique(np.linspace(0, len(prepared.test) - 1, count).astype(np.int64))
    _, job = next(prepared.evaluator.iterate_models(progress), (None, None))
    if job is None:  # personal models, which stay with the clients
        return ()
    batch_size = prepared.config.evaluation.batch_size
    with prepared.engine.stages.stage("evaluation", len(indices)):
        predictions = prepared.engine.predict(job, prepared.test, indices, batch_size, generate=True)
    predicted = prepared.task.decode_predictions(predictions)
    targets = prepared.task.decode_targets(prepared.test, indices.tolist())
    return tuple(
        {"text": prepared.test_names[index], "label": target, "prediction": prediction}
        for index, target, prediction in zip(indices.tolist(), targets, predicted, strict=True)
    )
