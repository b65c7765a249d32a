"""Reports of a run while it runs: events for listeners, and final scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedspan.training.stages import Stage

if TYPE_CHECKING:
    from torch import Tensor

    from fedspan.federation.progress import Progress
    from fedspan.runs.setup import Prepared


class Listener:
    """Receives the events of a run; every method does nothing by default."""

    def on_environment_change(self, changes: Mapping[str, tuple[object, object]]) -> None:
        """Handle a run that resumes with other versions or threads, ``{name: (before, after)}``; bits may differ."""

    def on_start(self, prepared: Prepared, done: int, resumed: bool) -> None:
        """Handle the start of a run, which is built; ``done`` rounds are already finished."""

    def on_note(self, text: str) -> None:
        """Handle a note for the user, one sentence without its full stop."""

    def on_stage_change(self, stage: Stage | None) -> None:
        """Handle a new stage of the work, or progress within it; None: no stage is open.

        It is called after every batch, also from the threads that train, and must return quickly.
        """

    def on_round_start(self, round: int) -> None:
        """Handle the start of a round; rounds count from 1."""

    def on_client_order(self, round: int, client: str) -> None:
        """Handle that a client has an order in an asynchronous round, from an earlier round or since now."""

    def on_client_finish(self, round: int, client: str, loss: float) -> None:
        """Handle the end of a client's training; rounds count from 1."""

    def on_client_failure(self, round: int, client: str, reason: str) -> None:
        """Handle a training reply that was rejected on arrival or did not arrive; the round may be retried."""

    def on_round_finish(self, row: Mapping[str, Any]) -> None:
        """Handle a committed round; ``row`` is its line of metrics.jsonl."""

    def on_baseline_start(self, name: str, rounds: int) -> None:
        """Handle the start of a baseline's training."""

    def on_baseline_round(self, name: str, round: int, loss: float) -> None:
        """Handle a finished epoch of a baseline."""


class Listeners(Listener):
    """Passes every event on to several listeners, in their order."""

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = listeners

    def on_environment_change(self, changes: Mapping[str, tuple[object, object]]) -> None:
        for listener in self._listeners:
            listener.on_environment_change(changes)

    def on_start(self, prepared: Prepared, done: int, resumed: bool) -> None:
        for listener in self._listeners:
            listener.on_start(prepared, done, resumed)

    def on_note(self, text: str) -> None:
        for listener in self._listeners:
            listener.on_note(text)

    def on_stage_change(self, stage: Stage | None) -> None:
        for listener in self._listeners:
            listener.on_stage_change(stage)

    def on_round_start(self, round: int) -> None:
        for listener in self._listeners:
            listener.on_round_start(round)

    def on_client_order(self, round: int, client: str) -> None:
        for listener in self._listeners:
            listener.on_client_order(round, client)

    def on_client_finish(self, round: int, client: str, loss: float) -> None:
        for listener in self._listeners:
            listener.on_client_finish(round, client, loss)

    def on_client_failure(self, round: int, client: str, reason: str) -> None:
        for listener in self._listeners:
            listener.on_client_failure(round, client, reason)

    def on_round_finish(self, row: Mapping[str, Any]) -> None:
        for listener in self._listeners:
            listener.on_round_finish(row)

    def on_baseline_start(self, name: str, rounds: int) -> None:
        for listener in self._listeners:
            listener.on_baseline_start(name, rounds)

    def on_baseline_round(self, name: str, round: int, loss: float) -> None:
        for listener in self._listeners:
            listener.on_baseline_round(name, round, loss)


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
    from fedspan.federation.evaluation import summarize  # imports Transformers, which a listener does not need

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
