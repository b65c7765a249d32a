"""The end of a simulation's training: after the best round, final rounds in which clients train on all their examples.

Validation examples select the best round, and are then free to be trained on. The final rounds continue from the best
one with its learning rate. They have no checkpoints: a resumed run runs all of them again, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fedspan.assembly.run import Prepared
from fedspan.clients.mappings import LazyMapping
from fedspan.federation.federation import Federation
from fedspan.federation.progress import ClientData, Progress, RoundResult
from fedspan.run_folder import RunFolder
from fedspan.runs.final_scores import FinalScores, compute_final_scores
from fedspan.runs.predictions import record_items
from fedspan.runs.selection import Selection
from fedspan.transports.in_process import replace_clients

__all__ = ["finish_training"]


def finish_training(
    prepared: Prepared,
    best: Progress,
    selection: Selection,
    run_folder: RunFolder,
    on_result: Callable[[RoundResult], object],
) -> tuple[Progress, FinalScores]:
    """Run the final rounds, if the config has any and validation selected a trained round, and score the model.

    Args:
        prepared: The run, or its baseline.
        best: The best round.
        selection: What selected it.
        run_folder: Folder of the run, or of its baseline, for the predictions of the held-out examples.
        on_result: Called with the result of each final round.

    Returns:
        The progress after the final rounds, and its scores; those of the validation parts are of the best round, since
        the final rounds trained on them.
    """
    rounds = prepared.config.federation.final_rounds if selection.measured and best.state.round else 0
    validation = prepared.evaluator.evaluate_clients(best)[0] if rounds else None
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
    constant = replace(
        training,
        optimizer=replace(training.optimizer, lr=lr),
        schedule="constant",
        warmup_rounds=0,
        cycle_rounds=None,
    )
    return replace_clients(federation, LazyMapping(ids, build_client)).replace_training(constant)
