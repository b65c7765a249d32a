"""The end of a simulation's training: final rounds, in which clients train on all their examples, and the final scores.

Validation examples select the best round, and are then free to be trained on. The final rounds continue from the best
one with its learning rate. They have no checkpoints: a resumed run runs all of them again, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from fedspan.assembly.run import Prepared
from fedspan.clients.mappings import LazyMapping
from fedspan.federation.evaluation import summarize
from fedspan.federation.federation import Federation
from fedspan.federation.progress import ClientData, Progress, RoundResult
from fedspan.run_folder import RunFolder
from fedspan.runs.predictions import record_items
from fedspan.runs.selection import Selection
from fedspan.transports.in_process import replace_clients


@dataclass(frozen=True)
class FinalScores:
    """Scores of a run's final models.

    Args:
        by_value: Metrics on the held-out examples of each value of ``evaluation.by``.
    """

    scores: dict[str, Any]
    by_client: dict[str, dict[str, float]]
    by_value: dict[str, dict[str, Any]]


def compute_final_scores(
    prepared: Prepared, progress: Progress, on_predictions: Callable[[Tensor], None] | None = None
) -> FinalScores:
    """Compute the final scores: on the held-out set and on the clients' own test parts."""
    metric, scores = prepared.task.metric, dict[str, Any]()
    by_value: dict[str, dict[str, Any]] = {}
    validation, test_scores = prepared.evaluator.evaluate_once(progress)
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


def finish_training(
    prepared: Prepared,
    best: Progress,
    selection: Selection,
    run_folder: RunFolder,
    on_result: Callable[[RoundResult], object],
) -> tuple[Progress, FinalScores]:
    """Run the final rounds, if the config has any and validation selected a trained round, and score the model.

    Returns:
        The progress after the final rounds, and its scores; those of the validation parts are of the best round, since
        the final rounds trained on them.
    """
    rounds = prepared.config.federation.final_rounds if selection.measured and best.state.round else 0
    validation = prepared.evaluator.evaluate_once(best)[0] if rounds else None
    progress, federation = best, _include_validation(prepared, best) if rounds else prepared.federation
    for _ in range(rounds):
        result = federation.run_round(progress)
        on_result(result)
        progress = result.progress
    with record_items(prepared, run_folder, "result") as record:
        final = compute_final_scores(prepared, progress, record)
    if validation is not None:
        final = replace(final, scores={**final.scores, "validation": dict(validation.pooled)})
    return progress, final


def _include_validation(prepared: Prepared, best: Progress) -> Federation:
    """Return the federation with training on the validation examples, too, and the best round's learning rate."""
    federation, training = prepared.federation, prepared.federation.training
    weighs_examples = prepared.config.federation.weights == "examples"

    def build_client(index: int) -> ClientData:
        data = federation.clients[ids[index]]
        client, none = data.client, np.empty(0, np.int64)
        examples = client.examples + len(data.validation)
        weight = client.weight * examples / client.examples if weighs_examples else client.weight
        rows = np.sort(np.concatenate([data.train, data.validation]))
        return replace(data, client=replace(client, examples=examples, weight=weight), train=rows, validation=none)

    ids = tuple(federation.clients)
    lr = training.compute_lr(best.state.round - 1, federation.settings.rounds)
    changes = {"lr": lr, "schedule": "constant", "warmup_rounds": 0, "cycle_rounds": None}
    constant = training.model_copy(update=changes)
    return replace_clients(federation, LazyMapping(ids, build_client)).replace_training(constant)
