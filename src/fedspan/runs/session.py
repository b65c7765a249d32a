"""A run from its start or last checkpoint to its end, and its result."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedspan.config import RunConfig
from fedspan.data.files import FROM_TRAINERS
from fedspan.data.partition import Partition
from fedspan.diagnostics.measures import DiagnosticsRecorder
from fedspan.errors import FedspanError
from fedspan.federation.evaluation import ClientScores, describe_few_reports
from fedspan.federation.head_start import start_head
from fedspan.federation.progress import Progress, RoundResult, TooFewReplies, Transfer
from fedspan.files import convert_disk_errors, fsync_tree, read_bytes, remove, write_atomic
from fedspan.logs import JsonLines, read_lines
from fedspan.runs import checkpoint as checkpoints
from fedspan.runs.arrivals import require_same_arrivals
from fedspan.runs.baselines import train_baseline
from fedspan.runs.callbacks import Listener, Listeners, compute_final_scores, sample_predictions
from fedspan.runs.checkpoint_format import Checkpoint
from fedspan.runs.checkpoint_format import load as load_checkpoint
from fedspan.runs.divergence import find_divergence
from fedspan.runs.engine_setup import describe_refusal, keep_stacking_plan
from fedspan.runs.environment import record_environment
from fedspan.runs.extension import extend
from fedspan.runs.failures import count_failures
from fedspan.runs.folder import RunFolder
from fedspan.runs.integrity import (
    RESOLVED,
    compute_input_digests,
    describe_config,
    format_config,
    read_config,
    read_resolved_config,
    require_same_base,
    require_same_run,
)
from fedspan.runs.learning_rate import load_or_choose, read_range_test, run_range_test, set_rate
from fedspan.runs.ledger import Ledger
from fedspan.runs.model_card import RunReport, write_cards
from fedspan.runs.model_setup import resolve_pooling
from fedspan.runs.privacy_budget import Budget, generate_key, load_noise_key, store_noise_key
from fedspan.runs.progress_file import ProgressFile
from fedspan.runs.records import compute_result_digests
from fedspan.runs.selection import Selection, has_stalled
from fedspan.runs.setup import Prepared, prepare
from fedspan.runs.suspects import find_limited
from fedspan.runs.trained_models import write_adapters
from fedspan.tasks.bounded_losses import compute_guess_loss
from fedspan.training.stages import Stages

__all__ = ["Build", "Host", "load_partition", "run", "write_adapters"]


def load_partition(run_folder: RunFolder) -> Partition | None:
    """Load the partition that a run was started with, if it is stored."""
    if not run_folder.partition.exists():
        return None
    return Partition.from_json(read_bytes(run_folder.partition).decode(errors="replace"), str(run_folder.partition))


Host = Callable[[RunFolder, Prepared, Callable[[Prepared], RunReport]], RunReport]
"""Connects a prepared run to its local or remote clients, runs it, and returns its report."""

Build = Callable[[RunConfig, Partition | None, bytes | None, Stages], Prepared]


def run(
    config: RunConfig | None,
    folder: str | Path,
    *,
    resume: bool = False,
    listener: Listener | None = None,
    command: tuple[str, ...] = (),
    host: Host | None = None,
    build: Build = prepare,
    progress_file: ProgressFile | None = None,
) -> RunReport:
    """Run all rounds, export the best round's adapters and write the report.

    Args:
        config: Config of a new run; with ``resume``, one that extends the run (``extension.extend``), or None for that
            in the folder.
        folder: An empty or missing folder for a new run; a run folder for ``resume``.
        resume: Whether to continue after the last committed round.
        listener: Listener that receives the events of the run.
        command: The command line, for environment.json.
        host: Connects the run to remote clients; None: the clients are simulated in this process.
        build: Builds the prepared run from the config, the partition that the run was started with, if any, the
            secret key of its noise, if any, and the stages that it reports to.
        progress_file: The run's progress file, if the listener passes events on to it already; None: it is created.

    Raises:
        FedspanError: If the run fails for a reason that the user can correct.
    """
    listener = listener or Listener()
    if progress_file is None:
        progress_file = ProgressFile(RunFolder(folder).progress)
        listener = Listeners(listener, progress_file)
    command = command or tuple(sys.argv)
    if resume:
        with RunFolder.resume(folder) as run_folder, progress_file:
            if config is not None:
                extend(run_folder, read_config(run_folder.path), config, listener)
            stored = read_resolved_config(run_folder.path)
            if changes := record_environment(run_folder, stored.seed, command):
                listener.on_environment_change(changes)
            return _run(run_folder, stored, listener, resumed=True, host=host, build=build)
    if config is None:
        raise FedspanError("config", None, "a config for a new run")
    if config.evaluation.diagnostics is not None and host is not None:
        problem = "diagnostics need engine.name batched or loop, because no other process sees both ends of an update"
        raise FedspanError("evaluation.diagnostics", config.evaluation.diagnostics, problem=problem)
    with convert_disk_errors(Path(folder), "choose another folder"):
        RunFolder(folder).require_empty()  # before a model is loaded in vain
    config_text, unresolved, (config, note) = format_config(config), config.model, resolve_pooling(config)
    key = generate_key(config)
    # Before the folder is created: an invalid config leaves no files.
    prepared = build(config, None, key, Stages(listener.on_stage_change))
    with RunFolder.create(folder, config_text) as run_folder, progress_file:
        store_noise_key(run_folder.path, key)
        if config.model != unresolved:
            run_folder.write_json(run_folder.pooling, {name: getattr(config.model, name) for name in RESOLVED})
        if note is not None:
            listener.on_note(note)
        record_environment(run_folder, config.seed, command)
        return _run(run_folder, config, listener, resumed=False, prepared=prepared, host=host, build=build)


def _run(
    run_folder: RunFolder,
    config: RunConfig,
    listener: Listener,
    *,
    resumed: bool,
    prepared: Prepared | None = None,
    host: Host | None = None,
    build: Build = prepare,
) -> RunReport:
    is_secret = config.privacy is not None and config.privacy.randomness == "secret"
    if is_secret or host is not None:  # it has cohorts, and clients' updates
        with convert_disk_errors(run_folder.path, "choose another folder"):
            run_folder.path.chmod(0o700)
    stored = checkpoints.resume(run_folder)
    if prepared is None:
        require_same_run(run_folder, config, stored)
        stages = Stages(listener.on_stage_change)
        prepared = build(config, load_partition(run_folder), load_noise_key(run_folder.path, config), stages)
    if prepared.partition is not None and not run_folder.partition.exists():
        with convert_disk_errors(run_folder.path):
            write_atomic(run_folder.partition, (prepared.partition.to_json() + "\n").encode())

    if prepared.base_digest is not None:
        digest = prepared.base_digest()
        if not run_folder.base.exists():
            run_folder.write_json(run_folder.base, {"sha256": digest})
        require_same_base(run_folder, digest, "trainers" if config.data.train == FROM_TRAINERS else "model")

    settings = prepared.federation.settings.buffered
    if settings is not None and settings.arrivals is not None:
        require_same_arrivals(run_folder, settings.arrivals)

    if config.training.lr == "auto":
        tested = prepared
        lr = load_or_choose(run_folder.learning_rate, lambda: run_range_test(tested, config.default_lr))
        prepared = set_rate(prepared, lr)

    def run_rounds(prepared: Prepared) -> RunReport:
        with JsonLines(run_folder.metrics) as metrics, Ledger(run_folder.ledger) as ledger:
            session = _Session(run_folder, prepared, listener, metrics, ledger)
            return session.finish(session.run_rounds(stored, resumed))

    return run_rounds(prepared) if host is None else host(run_folder, prepared, run_rounds)


class _Session:
    """The state of one process's work on a run."""

    def __init__(
        self, run_folder: RunFolder, prepared: Prepared, listener: Listener, metrics: JsonLines, ledger: Ledger
    ) -> None:
        self.run_folder, self.prepared, self.listener = run_folder, prepared, listener
        self.metrics, self.ledger = metrics, ledger
        self.seconds = 0.0
        self.start_scores: dict[str, Any] = {}
        self.selection = Selection()
        self.has_noted_few = False
        self.budget = Budget(prepared.config, path=run_folder.privacy)
        self.inputs = compute_input_digests(run_folder)
        interval = prepared.config.evaluation.diagnostics
        self.diagnostics = None if interval is None else DiagnosticsRecorder(prepared.federation, interval)

    def run_rounds(self, stored: Checkpoint | None, resumed: bool) -> Progress:
        """Run all remaining rounds."""
        federation = self.prepared.federation
        progress = None
        if stored is not None:
            progress = stored.progress
            self.selection, self.seconds = stored.selection, float(stored.extra.get("seconds", 0.0))
            self.start_scores = json.loads(str(stored.extra.get("start", "{}")))
            spent, finished = str(stored.extra.get("privacy", "{}")), progress.state.round
            self.budget = Budget(self.prepared.config, spent, self.run_folder.privacy, finished)
            if self.selection.best is not None:
                federation.retain(load_checkpoint(self.run_folder.best).progress)
        engine = self.prepared.engine
        keep_stacking_plan(self.run_folder, engine)
        self.listener.on_start(self.prepared, 0 if progress is None else progress.state.round, resumed)
        if self.prepared.config.training.lr == "auto":
            lr = federation.training.optimizer.lr
            self.listener.on_note(f"training.lr is {lr:g}, by a range test ({self.run_folder.learning_rate.name})")
        if progress is None:
            progress = self._start()
        first = progress.state.round + 1
        if not progress.state.round and self.budget.limited:
            self.budget.require_first(federation.compute_next_charges(progress))
        while not self._is_finished(progress):
            started, number = time.monotonic(), progress.state.round + 1

            def report_loss(client: str, loss: float, number: int = number) -> None:
                self.listener.on_client_finish(number, client, loss)

            report_failure = partial(self.listener.on_client_failure, number)
            report_order = partial(self.listener.on_client_order, number)
            announce = partial(self.budget.announce, progress.state.round)
            self.listener.on_round_start(number)
            if self.diagnostics is None:
                result = federation.run_round(
                    progress, report_loss, on_charge=announce, on_failure=report_failure, on_order=report_order
                )
                diagnosis = None
            else:
                result, diagnosis = self.diagnostics.run_round(progress, report_loss, announce, report_failure)
            for note in (describe_refusal(self.prepared.config, engine), federation.get_note()):
                if number == first and note is not None:
                    self.listener.on_note(note)
            row = self._build_row(result) | ({} if diagnosis is None else {"diagnostics": diagnosis})
            self.seconds += time.monotonic() - started - (0.0 if diagnosis is None else diagnosis["seconds"])
            progress = self._commit(result, {**row, "seconds": self.seconds})
            del result  # the cohort's state is now on the disk
        if self.diagnostics is not None and self.diagnostics.seconds:
            seconds = self.diagnostics.seconds
            self.listener.on_note(f"evaluation.diagnostics took {seconds:.1f} s beside the rounds themselves")
        return progress

    def _start(self) -> Progress:
        """Return the progress before the first round; one whose head starts from statistics is rated and saved."""
        prepared, started = self.prepared, time.monotonic()
        prepared.federation.begin_round(0)
        if prepared.head is None:
            progress = prepared.federation.begin()
            if prepared.evaluator.is_local:
                self.start_scores, _ = self._evaluate(progress)
                self.seconds += time.monotonic() - started
            return progress
        try:
            progress = start_head(prepared.federation, prepared.federation.begin(), prepared.head)
            row = {"round": 0, "head_init": prepared.head.kind, **self._measure_progress(progress)}
        except TooFewReplies as error:
            if prepared.config.model.head_init != "auto":
                remedy = "Fix the cause and resume, or start a run with model.head_init: auto"
                raise error.relocate("model.head_init", note=remedy) from None
            progress, reason = prepared.federation.begin(), f"{error.problem}"
            self.listener.on_note(f"the head starts at random: {reason}")
            row = {"round": 0, "head_init": "random", "reason": reason}
        self.seconds += time.monotonic() - started
        result = RoundResult(progress, transfers=(), cohort=(), lr=0.0, loss=math.nan)
        return self._commit(result, {**row, "seconds": self.seconds})

    def _is_finished(self, progress: Progress) -> bool:
        """Check whether all rounds are finished, or something ends the run before its last round."""
        return (
            progress.state.round >= self.prepared.federation.settings.rounds or self._explain_stop(progress) is not None
        )

    def _explain_stop(self, progress: Progress) -> str | None:
        """Return the reason why no further round follows before the last one, as a clause; None: there is none."""
        federation, number = self.prepared.federation, progress.state.round
        improved = self.selection.improved
        if improved is not None and has_stalled(self.prepared.config, number, improved):
            if not improved.round:
                return "no round is better than the start by validation (federation.early_stopping)"
            metric = self.prepared.config.evaluation.get_selection_metric(self.prepared.task.metric)
            problem = "loss has not fallen" if metric == "loss" else "score has not improved"
            return f"the validation {problem} since round {improved.round} (federation.early_stopping)"
        if self.budget.limited and not self.budget.can_spend(federation.compute_next_charges(progress)):
            return "the next one would exceed privacy.epsilon"
        return None

    def _build_row(self, result: RoundResult) -> dict[str, Any]:
        """Build the round's line of metrics, and update the best round."""
        prepared, progress = self.prepared, result.progress
        number = progress.state.round
        row: dict[str, Any] = {
            "round": number,
            "loss": result.loss,
            "lr": result.lr,
            "cohort": list(result.cohort),
        }
        self.budget.count(result.charges)
        if (spent := self.budget.to_row()) is not None:
            row["privacy"] = spent
        if number % prepared.config.evaluation.every and not self._is_finished(progress):
            return row
        return row | self._measure_progress(progress)

    def _measure_progress(self, progress: Progress) -> dict[str, Any]:
        """Measure a progress, and update the best round."""
        prepared, number = self.prepared, progress.state.round
        scores, validation = self._evaluate(progress)
        metric = prepared.config.evaluation.get_selection_metric(prepared.task.metric)
        before, self.selection = self.selection.best, self.selection.add(metric, number, validation)
        if self.selection.best is not before:
            prepared.federation.retain(progress)
        if validation is not None and validation.trimmed is not None:
            if (deciding := self.selection.compute_deciding_means(metric)) is not None:
                scores["validation_trimmed"] = deciding
            else:
                self._note_few_reports(metric)
        elif validation is None and prepared.config.federation.early_stopping is not None:
            self._note_few_reports(metric)
        if validation is not None and self.selection.measured and self.selection.best is not None:
            scores["best_round"] = self.selection.best.round
        return scores

    def _evaluate(self, progress: Progress) -> tuple[dict[str, Any], ClientScores | None]:
        """Return a progress's scores for its row of metrics, and those of the clients' validation parts."""
        prepared, scores = self.prepared, dict[str, Any]()
        validation, test = prepared.evaluator.evaluate_clients(progress)
        if validation is not None:
            scores["validation"] = dict(validation.pooled)
        if test is not None:
            scores["clients"] = test.summarize(prepared.task.metric)
        if prepared.test is not None and not prepared.federation.method.declare_claims().personal:
            scores["test"] = dict(prepared.evaluator.evaluate_heldout(progress, prepared.test)["global"])
        return scores, validation

    def _note_few_reports(self, metric: str) -> None:
        """Tell the user once if too few clients have sent metrics to select a round."""
        evaluated, reporting = len(self.prepared.evaluator.ids), self.selection.count_reporting(metric)
        note = describe_few_reports(evaluated, reporting)
        if note is not None and not self.selection.measured and not self.has_noted_few:
            self.listener.on_note(note)
        self.has_noted_few = True

    def _commit(self, result: RoundResult, row: dict[str, Any]) -> Progress:
        """Write clients' files and logs, then the checkpoint that names them: a kill before it loses this round only.

        Returns:
            The progress, with the clients' state on the disk.
        """
        progress = checkpoints.store_clients(self.run_folder, result.progress)
        number, events = progress.state.round, self.prepared.federation.pop_events()
        self._record(number, (*result.transfers, *events.transfers))
        if failures := (*result.failures, *events.failures):
            row["failures"] = [asdict(failure) for failure in failures]
        if result.late:
            row["late"] = list(result.late)
        joined, left = (
            self.prepared.federation.presence.list_changes(progress.state.round - 1) if result.cohort else ((), ())
        )
        if joined:
            row["joined"] = list(joined)
        if left:
            row["left"] = list(left)
        if result.clipped:
            row["clipped"] = dict(result.clipped)
        if result.lowered:
            row["lowered_weights"] = dict(result.lowered)
        if result.arrivals is not None:
            row["arrivals"] = [list(arrival) for arrival in result.arrivals]
        if result.simulated_seconds is not None:
            row["simulated_seconds"] = result.simulated_seconds
        totals = self.ledger.totals
        row["bytes"] = {"down": totals.run("down").bytes, "up": totals.run("up").bytes}
        self.metrics.append(row)
        positions = {
            self.run_folder.metrics.name: self.metrics.commit(),
            self.run_folder.ledger.name: self.ledger.commit(),
        }
        checkpoints.save(
            self.run_folder,
            Checkpoint(
                state=progress.state,
                memories=progress.memories,
                last_rounds=progress.last_rounds,
                optimizer_states=progress.optimizers,
                selection=self.selection,
                positions=positions,
                inputs=self.inputs,
                extra={
                    "seconds": self.seconds,
                    "start": json.dumps(self.start_scores),
                    "config": describe_config(self.prepared.config),
                    "privacy": self.budget.dump(),
                },
                last_replies=progress.last_replies,
                open=self.prepared.federation.transport.select_resumable(progress.open),
            ),
        )
        checkpoints.prune(self.run_folder)
        self.listener.on_round_finish(row)
        return progress

    def _record(self, round: int, transfers: Iterable[Transfer]) -> None:
        for transfer in transfers:
            self.ledger.record(
                round, transfer.client, transfer.direction, transfer.bytes, transfer.payload, transfer.purpose
            )

    def finish(self, progress: Progress) -> RunReport:
        """Evaluate the best round, export its adapters, train the baselines, write the report."""
        prepared, run_folder = self.prepared, self.run_folder
        prepared.federation.transport.retain_orders(())  # no reply counts any more
        best_round = last_round = progress.state.round
        stopped = self._explain_stop(progress) if last_round < prepared.federation.settings.rounds else None
        if stopped is not None:
            self.listener.on_note(f"stopped after round {last_round}: {stopped}")
        best = self.selection.best
        if best is not None and best.round != progress.state.round:
            best_round, progress = best.round, load_checkpoint(run_folder.best).progress
        final = compute_final_scores(prepared, progress)
        with convert_disk_errors(run_folder.path), prepared.engine.stages.stage("export"):
            remove(run_folder.adapter)  # of a run before it was extended
            adapters = write_adapters(prepared, progress, run_folder, prepared.evaluator.get_ids(progress))
        failures = prepared.federation.conclude(progress)
        for failure in failures:
            self.listener.on_note(f"{failure.client} did not export its own adapter: {failure.reason}")
        events = prepared.federation.pop_events()
        self._record(best_round, events.transfers)
        logs = {run_folder.metrics.name: self.metrics.commit(), run_folder.ledger.name: self.ledger.commit()}
        examples = sample_predictions(prepared, progress)
        totals = self.ledger.totals
        start = next((row for row in read_lines(run_folder.metrics) if row["round"] == 0), {})
        # Baselines start like the federation, whose clients may have sent too few statistics.
        compared = replace(prepared, head=None) if start.get("head_init") == "random" else prepared
        report = RunReport(
            method=prepared.config.method.title,
            task=prepared.config.task,
            metric=prepared.task.metric,
            rounds=last_round,
            best_round=best_round,
            scores=final.scores,
            by_client=final.by_client,
            bytes={"down": totals.run("down").bytes, "up": totals.run("up").bytes},
            seconds=self.seconds,
            baselines={
                name: train_baseline(compared, name, self.listener, run_folder.baselines / name)
                for name in prepared.config.baselines
            },
            adapters={id: str(path.relative_to(run_folder.path)) for id, path in adapters.items()},
            examples=examples,
            privacy=self.budget.build_report(),
            other_bytes=totals.out_of_round,
            failures=count_failures(read_lines(run_folder.metrics), best_round, (*events.failures, *failures)),
            learning_rate=read_range_test(run_folder.learning_rate),
            selected=self.selection.measured,
            warnings=(
                *find_divergence(
                    read_lines(run_folder.metrics),
                    prepared.task.metric,
                    prepared.federation.training.optimizer.lr,
                    compute_guess_loss(prepared.task),
                    self.start_scores,
                    getattr(prepared.task, "loss_bound", None) if prepared.partition is None else None,
                ),
                *find_limited(read_lines(run_folder.metrics)),
            ),
            by_value=final.by_value,
            start={key: start[key] for key in ("head_init", "reason", "validation", "clients", "test") if key in start},
        )
        with convert_disk_errors(run_folder.path):
            write_cards(prepared, report, run_folder)
            if adapters:  # in deployments, personal models stay with their clients
                fsync_tree(run_folder.adapter)  # before the report that names the files
        content = {key: getattr(report, key) for key in report.__dataclass_fields__}
        files = {**self.inputs, **compute_result_digests(run_folder)}
        records = {"config": describe_config(prepared.config), "files": files, "logs": logs}
        run_folder.write_sealed(run_folder.report, {**content, **records})
        return report
