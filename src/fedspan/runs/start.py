"""The start or the resumption of a run, up to its report."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedspan.assembly.engine import keep_stacking_plan
from fedspan.assembly.model import resolve_pooling
from fedspan.assembly.run import Prepared, prepare
from fedspan.assembly.server import ServerRun
from fedspan.config import RunConfig
from fedspan.data.files import FROM_TRAINERS
from fedspan.data.partition import Partition
from fedspan.errors import FedspanError
from fedspan.federation.config import Arrivals
from fedspan.federation.progress import Progress
from fedspan.files import convert_disk_errors, fsync_tree, remove, write_atomic
from fedspan.logs import JsonLines, read_lines
from fedspan.progress.file import ProgressFile
from fedspan.progress.listener import Listener, Listeners
from fedspan.run_folder import RunFolder, compute_result_digests
from fedspan.runs import checkpoint as checkpoints
from fedspan.runs.baselines import train_baseline
from fedspan.runs.checkpoint_format import load as load_checkpoint
from fedspan.runs.environment import record_environment
from fedspan.runs.extension import extend
from fedspan.runs.final_rounds import finish_training, sample_predictions
from fedspan.runs.integrity import (
    RESOLVED,
    anchor_paths,
    describe_config,
    format_config,
    read_config,
    require_intact,
    require_same_base,
    require_same_run,
    resolve_config,
)
from fedspan.runs.learning_rate import load_or_choose, read_range_test, run_range_test, set_rate
from fedspan.runs.ledger import Ledger
from fedspan.runs.model_card import write_cards
from fedspan.runs.privacy_budget import generate_key, load_noise_key, store_noise_key
from fedspan.runs.report import RunReport, format_final_rounds, read_partition
from fedspan.runs.session import Session
from fedspan.runs.trained_models import write_adapters
from fedspan.runs.warnings import count_failures, find_divergence, find_limited
from fedspan.tasks.losses import compute_guess_loss
from fedspan.training.stages import Stages

_START = ("head_init", "simulated", "reason", "validation", "clients", "test")
"""Parts of the line of a start in metrics.jsonl that a report has."""

Built = Prepared | ServerRun

HostRun = Callable[[RunFolder, Any, Callable[[Prepared], RunReport]], RunReport]
"""Connects a run that was built to its local or remote clients, runs it, and returns its report."""

Build = Callable[[RunConfig, Partition | None, bytes | None, Stages], Built]


def run(
    config: RunConfig | None,
    folder: str | Path,
    *,
    resume: bool = False,
    listener: Listener | None = None,
    command: tuple[str, ...] = (),
    host: HostRun | None = None,
    build: Build = prepare,
    progress_file: ProgressFile | None = None,
) -> RunReport:
    """Run all rounds, export the best round's adapters and write the report.

    Args:
        config: Config of a new run; with ``resume``, one that extends the run (``extension.extend``), or None for that
            in the folder.
        folder: An empty or missing folder for a new run; a run folder for ``resume``.
        host: Connects the run to remote clients; None: the clients are simulated in this process.
        build: Builds the run from the config, the partition that the run was started with, if any, the
            secret key of its noise, if any, and the stages that it reports to.
        progress_file: The run's progress file, if the listener passes events on to it already; None: it is created.
    """
    listener = listener or Listener()
    if progress_file is None:
        progress_file = ProgressFile(RunFolder(folder).progress)
        listener = Listeners(listener, progress_file)
    command = command or tuple(sys.argv)
    if resume:
        with RunFolder.resume(folder) as run_folder, progress_file:
            before, built = read_config(run_folder.path), None
            used = resolve_config(run_folder, config or before)
            _require_watched_clients(used, host)
            if config is not None:
                require_intact(run_folder)
                # Built before the folder changes: a change that this machine cannot make leaves the run as it was.
                built = _build_again(run_folder, used, listener, build)
                extend(run_folder, before, config, listener)
            if changes := record_environment(run_folder, used.seed, command, used.threads):
                listener.on_environment_change(changes)
            return _run(run_folder, used, listener, resumed=True, built=built, host=host, build=build)
    if config is None:
        raise FedspanError("config", None, "a config for a new run")
    _require_watched_clients(config, host)
    with convert_disk_errors(Path(folder), "choose another folder"):
        RunFolder(folder).require_empty()  # before a model is loaded in vain
    config_text, config = format_config(config), anchor_paths(config, os.getcwd())
    unresolved, (config, note) = config.model, resolve_pooling(config)
    key = generate_key(config)
    # Before the folder is created: an invalid config leaves no files.
    built = build(config, None, key, Stages(listener.on_stage_change))
    with RunFolder.create(folder, config_text) as run_folder, progress_file:
        store_noise_key(run_folder.path, key)
        if config.model != unresolved:
            run_folder.write_json(run_folder.pooling, {name: getattr(config.model, name) for name in RESOLVED})
        if note is not None:
            listener.on_note(note)
        record_environment(run_folder, config.seed, command)
        return _run(run_folder, config, listener, resumed=False, built=built, host=host, build=build)


def _require_watched_clients(config: RunConfig, host: HostRun | None) -> None:
    """Check that diagnostics see the clients."""
    if config.evaluation.diagnostics is not None and host is not None:
        problem = "diagnostics need engine.name batched or loop, because no other process sees both ends of an update"
        raise FedspanError("evaluation.diagnostics", config.evaluation.diagnostics, problem=problem)


def _build_again(run_folder: RunFolder, config: RunConfig, listener: Listener, build: Build) -> Built:
    """Build a run that has begun, on its own partition and key."""
    key = load_noise_key(run_folder.path, config)
    partition = read_partition(run_folder.path) if run_folder.partition.exists() else None
    return build(config, partition, key, Stages(listener.on_stage_change))


def _run(
    run_folder: RunFolder,
    config: RunConfig,
    listener: Listener,
    *,
    resumed: bool,
    built: Built | None = None,
    host: HostRun | None = None,
    build: Build = prepare,
) -> RunReport:
    is_secret = config.privacy is not None and config.privacy.randomness == "secret"
    if is_secret or host is not None:  # it has cohorts, and clients' updates
        with convert_disk_errors(run_folder.path, "choose another folder"):
            run_folder.path.chmod(0o700)
    stored = checkpoints.resume(run_folder)
    if resumed:
        require_same_run(run_folder, config, stored)
    if built is None:
        built = _build_again(run_folder, config, listener, build)
    if built.base_digest is not None:
        digest = built.base_digest()
        if not run_folder.base.exists():
            run_folder.write_json(run_folder.base, {"sha256": digest})
        require_same_base(run_folder, digest, "trainers" if config.data.train == FROM_TRAINERS else "model")
    keep_stacking_plan(run_folder, built.engine)
    if isinstance(built, Prepared):
        built = _prepare_locally(run_folder, built)

    def run_rounds(prepared: Prepared) -> RunReport:
        with JsonLines(run_folder.metrics) as metrics, Ledger(run_folder.ledger) as ledger:
            session = Session(run_folder, prepared, listener, metrics, ledger)
            return _finish(session, session.run_rounds(stored, resumed))

    if host is not None:
        return host(run_folder, built, run_rounds)
    assert isinstance(built, Prepared), "a server needs its nodes"
    return run_rounds(built)


def _prepare_locally(run_folder: RunFolder, prepared: Prepared) -> Prepared:
    """Store or check what a run with its clients in this process begins with, and find its learning rate."""
    if prepared.partition is not None and not run_folder.partition.exists():
        with convert_disk_errors(run_folder.path):
            write_atomic(run_folder.partition, (prepared.partition.to_json() + "\n").encode())
    if (arrivals := prepared.federation.settings.arrivals) is not None:
        _require_same_arrivals(run_folder, arrivals)
    config = prepared.config
    if config.training.lr != "auto":
        return prepared
    lr = load_or_choose(run_folder.learning_rate, lambda: run_range_test(prepared, config.default_lr))
    return set_rate(prepared, lr)


def _require_same_arrivals(run_folder: RunFolder, arrivals: Arrivals) -> None:
    """Store the arrivals that a run repeats, or compare them with those with which it began."""
    rounds = [[list(arrival) for arrival in row] for row in arrivals]
    if not run_folder.arrivals.exists():
        run_folder.write_json(run_folder.arrivals, rounds)
    elif run_folder.read_json(run_folder.arrivals) != rounds:
        problem = f"its arrivals are not those with which the run began ({run_folder.arrivals}). Name the same record"
        raise FedspanError("federation.buffered.replay", None, problem=problem)


def _finish(session: Session, progress: Progress) -> RunReport:
    """Evaluate the best round, export its adapters, train the baselines, write the report."""
    prepared, run_folder = session.prepared, session.run_folder
    prepared.federation.transport.retain_orders(())  # no reply counts any more
    best_round = last_round = progress.state.round
    stopped = session.explain_stop(progress) if last_round < prepared.federation.settings.rounds else None
    if stopped is not None:
        session.listener.on_note(f"stopped after round {last_round}: {stopped}")
    best = session.selection.best
    if best is not None and best.round != progress.state.round:
        best_round, progress = best.round, load_checkpoint(run_folder.best).progress
    progress, final = finish_training(
        prepared,
        progress,
        session.selection,
        run_folder,
        lambda result: session.record(result.progress.state.round + last_round - best_round, result.transfers),
    )
    final_rounds = progress.state.round - best_round
    if final_rounds:
        session.listener.on_note(f"{format_final_rounds(final_rounds)}, ran after round {best_round}")
    with convert_disk_errors(run_folder.path), prepared.engine.stages.stage("export"):
        remove(run_folder.adapter)  # of a run before it was extended
        adapters = write_adapters(prepared, progress, run_folder, prepared.evaluator.get_ids(progress))
    failures = prepared.federation.conclude(progress)
    for failure in failures:
        session.listener.on_note(f"{failure.client} did not export its own adapter: {failure.reason}")
    events = prepared.federation.pop_events()
    session.record(best_round, events.transfers)
    logs = {run_folder.metrics.name: session.metrics.commit(), run_folder.ledger.name: session.ledger.commit()}
    examples = sample_predictions(prepared, progress)
    totals = session.ledger.totals
    start = next((row for row in read_lines(run_folder.metrics) if row["round"] == 0), {})
    # Baselines start like the federation, whose clients may have sent too few statistics.
    compared = replace(prepared, head=None) if start.get("head_init") == "random" else prepared
    report = RunReport(
        method=prepared.config.method.title,
        task=prepared.config.task,
        metric=prepared.task.metric,
        rounds=last_round,
        best_round=best_round,
        final_rounds=final_rounds,
        scores=final.scores,
        by_client=final.by_client,
        bytes={"down": totals.run("down").bytes, "up": totals.run("up").bytes},
        seconds=session.seconds,
        baselines={
            name: train_baseline(compared, name, session.listener, run_folder.baselines / name)
            for name in prepared.config.baselines
        },
        adapters={id: str(path.relative_to(run_folder.path)) for id, path in adapters.items()},
        examples=examples,
        privacy=session.budget.build_report(),
        other_bytes=totals.out_of_round,
        failures=count_failures(read_lines(run_folder.metrics), best_round, (*events.failures, *failures)),
        learning_rate=read_range_test(run_folder.learning_rate),
        selected=session.selection.measured,
        warnings=(
            *find_divergence(
                read_lines(run_folder.metrics),
                prepared.task.metric,
                prepared.federation.training.optimizer_spec.lr,
                compute_guess_loss(prepared.task),
                session.start_scores,
            ),
            *find_limited(read_lines(run_folder.metrics)),
        ),
        by_value=final.by_value,
        start={**session.start_scores, **{key: value for key, value in start.items() if key in _START}},
    )
    with convert_disk_errors(run_folder.path):
        write_cards(prepared, report, run_folder)
        if adapters:  # in deployments, personal models stay with their clients
            fsync_tree(run_folder.adapter)  # before the report that names the files
    content = {key: getattr(report, key) for key in report.__dataclass_fields__}
    files = {**session.inputs, **compute_result_digests(run_folder)}
    records = {"config": describe_config(prepared.config), "files": files, "logs": logs}
    run_folder.write_sealed(run_folder.report, {**content, **records})
    return report
