"""Baselines of a federation: local-only and centralized training, with as many passes over the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from fedspan.assembly.engine import keep_stacking_plan, make_engine
from fedspan.assembly.head import begin, begin_locally, compute_baseline_head, find_new_head
from fedspan.assembly.run import Prepared
from fedspan.clients.mappings import LazyMapping
from fedspan.config import MethodConfig, RunConfig
from fedspan.core.method import RegisteredMethod
from fedspan.core.values import Client
from fedspan.federation.evaluation import Evaluator
from fedspan.federation.federation import Federation
from fedspan.federation.progress import ClientData, Progress
from fedspan.files import convert_disk_errors, remove
from fedspan.progress.listener import Listener
from fedspan.run_folder import RunFolder
from fedspan.runs import checkpoint as checkpoints
from fedspan.runs.checkpoint_format import Checkpoint
from fedspan.runs.checkpoint_format import load as load_checkpoint
from fedspan.runs.final_rounds import finish_training
from fedspan.runs.learning_rate import load_or_choose, read_range_test, run_range_test, set_rate
from fedspan.runs.selection import Selection, has_stalled
from fedspan.transports.in_process import simulate


def build_pooled(prepared: Prepared) -> Prepared:
    """Build the centralized baseline: all training examples on one client, optimizer moments stored.

    The pooled validation parts of the clients select the epoch; its model is evaluated on each client's own test part.
    """
    clients = prepared.federation.clients
    changed, method = _set_method(prepared, "fedit")
    parts = [(data.train, data.validation, data.test) for data in clients.values()]
    train, validation, test = (np.concatenate(part) for part in zip(*parts, strict=True))
    client = Client("all", method.r, method.get_scaling(None), len(train), 1.0)
    data = ClientData(client, train, validation, test)
    variant = _build_variant(prepared, changed, method, [data], changed.centralized_lr)
    federation = variant.federation
    # Client by client: the same bits, whether or not the federation did it before.
    variant.engine.prepare(prepared.train, [indices for part in parts for indices in part[:2]])
    judged = simulate(federation.method, variant.engine, clients, prepared.train, federation.settings)
    return replace(variant, evaluator=_build_evaluator(judged, changed))


def build_local_only(prepared: Prepared) -> Prepared:
    """Build the local-only baseline: every client trains LoRA on its own examples, optimizer moments stored."""
    changed, method = _set_method(prepared, "local-only")
    clients = prepared.federation.clients
    ids = tuple(clients)

    def build_client(index: int) -> ClientData:
        data = clients[ids[index]]
        return replace(data, client=replace(data.client, rank=method.r, scaling=method.get_scaling(None)))

    return _build_variant(prepared, changed, method, LazyMapping(ids, build_client), None)


def _set_method(prepared: Prepared, name: str) -> tuple[RunConfig, RegisteredMethod]:
    """Return the run's config with another method of the same rank and scaling and its own head, and that method."""
    config = prepared.config
    options = {key: value for key, value in config.method.options.items() if key in ("r", "lora_alpha", "use_rslora")}
    model = config.model.model_copy(update={"extras": None})
    changes = {"method": MethodConfig(name=name, **options), "model": model, "privacy": None}
    changed = config.model_copy(update=changes)
    return changed, changed.build_method(prepared.engine.adapted.spec)


def _build_variant(
    prepared: Prepared,
    config: RunConfig,
    method: RegisteredMethod,
    clients: Sequence[ClientData] | Mapping[str, ClientData],
    lr: float | None,
) -> Prepared:
    """Build a baseline on the same model and data: all clients participate in every round and store their moments."""
    training = prepared.federation.training
    changes = {"lr": training.lr if lr is None else lr, "optimizer_state": "keep", "logit_adjustment": 0.0}
    settings = training.model_copy(update=changes)
    engine = make_engine(config, prepared.engine.adapted, prepared.task, settings, None, shared_with=prepared.engine)
    rounds = config.build_round_settings().trust().model_copy(update={"clients_per_round": None, "buffered": None})
    federation = simulate(
        config.wrap_method(method, find_new_head(prepared.config, prepared.model)),
        engine,
        clients,
        prepared.train,
        rounds,
    )
    evaluator = _build_evaluator(federation, config)
    head = compute_baseline_head(prepared.head)
    return replace(prepared, config=config, engine=engine, federation=federation, evaluator=evaluator, head=head)


def _build_evaluator(federation: Federation, config: RunConfig) -> Evaluator:
    return Evaluator(federation, config.evaluation.batch_size, config.evaluation.clients)


BASELINES = {"local-only": build_local_only, "centralized": build_pooled}
_BEGINNINGS = {"local-only": begin_locally, "centralized": begin}


def train_baseline(prepared: Prepared, name: str, listener: Listener, folder: Path) -> dict[str, Any]:
    """Train a baseline for as many epochs as the federation may have rounds, and score its best epoch by validation.

    Every epoch is saved, and a finished baseline is read instead of trained again.

    Args:
        folder: The baseline's own folder, inside a run whose lock this process holds.

    Returns:
        ``best_round``, ``scores`` and ``by_client``, as in a ``RunReport``; ``learning_rate`` if centralized training
        had a range test of its own.
    """
    run_folder = RunFolder(folder)
    if run_folder.report.is_file():
        return cast(dict[str, Any], run_folder.read_sealed(run_folder.report))
    variant = BASELINES[name](prepared)
    keep_stacking_plan(run_folder, variant.engine)
    config, tested = variant.config, run_folder.learning_rate
    if name == "centralized" and config.training.lr == "auto" and config.centralized_lr is None:
        untested = variant
        variant = set_rate(variant, load_or_choose(tested, lambda: run_range_test(untested, config.default_lr)))
    federation, evaluator = variant.federation, variant.evaluator
    listener.on_baseline_start(name, federation.settings.rounds)
    stored = checkpoints.resume(run_folder) if folder.is_dir() else None
    progress, selection = (
        (_BEGINNINGS[name](federation, variant.head), Selection())
        if stored is None
        else (stored.progress, stored.selection)
    )
    metric = variant.config.evaluation.get_selection_metric(variant.task.metric)

    def rate_and_save(progress: Progress, selection: Selection) -> Selection:
        """Rate the model after an epoch, or before the first one, and save it."""
        validation, _ = evaluator.evaluate_clients(progress)
        selection = selection.add(metric, progress.state.round, validation)
        checkpoints.save(
            run_folder,
            Checkpoint(
                state=progress.state,
                states=progress.states,
                last_rounds=progress.last_rounds,
                selection=selection,
                last_replies=progress.last_replies,
            ),
        )
        checkpoints.prune(run_folder)
        return selection

    if stored is None and variant.head is not None:  # as in the federation, the start may be the best
        progress = checkpoints.store_clients(run_folder, progress)
        selection = rate_and_save(progress, selection)
    while progress.state.round < federation.settings.rounds:
        if has_stalled(variant.config, progress.state.round, selection.improved):
            break
        result = federation.run_round(progress)
        progress = checkpoints.store_clients(run_folder, result.progress)
        selection = rate_and_save(progress, selection)
        listener.on_baseline_round(name, progress.state.round, result.loss)
    best = selection.best
    if best is not None and best.round != progress.state.round:
        progress = load_checkpoint(run_folder.best).progress
    _, final = finish_training(variant, progress, selection, run_folder, lambda _: None)
    report: dict[str, Any] = {"best_round": progress.state.round, **dataclasses.asdict(final)}
    if tested.is_file():
        report["learning_rate"] = read_range_test(tested)
    run_folder.write_sealed(run_folder.report, report)
    with convert_disk_errors(folder):  # as large as the run's own checkpoints, and nothing resumes from them
        remove(run_folder.checkpoints)
        remove(run_folder.clients)
        remove(run_folder.best)
        remove(tested)
    return report
