"""The rounds of a run, from its start or last checkpoint to its last round, with what is stored after each."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

from fedspan.assembly.engine import describe_refusal, without_stacking_plan
from fedspan.assembly.head import begin_at_random
from fedspan.assembly.run import Prepared
from fedspan.diagnostics.measures import DiagnosticsRecorder
from fedspan.federation.evaluation import ClientScores
from fedspan.federation.head_start import start_head
from fedspan.federation.plausibility import describe_few_reports
from fedspan.federation.progress import Progress, RoundResult, TooFewReplies, Transfer
from fedspan.logs import JsonLines
from fedspan.progress.listener import Listener
from fedspan.run_folder import RunFolder
from fedspan.runs import checkpoint as checkpoints
from fedspan.runs.checkpoint_format import Checkpoint
from fedspan.runs.checkpoint_format import load as load_checkpoint
from fedspan.runs.integrity import compute_input_digests, describe_config
from fedspan.runs.ledger import Ledger
from fedspan.runs.predictions import record_items
from fedspan.runs.privacy_budget import Budget
from fedspan.runs.selection import Selection, has_stalled
from fedspan.wrappers.head_rounds import HeadRounds


class Session:
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
        self.listener.on_start(self.prepared, 0 if progress is None else progress.state.round, resumed)
        if self.prepared.config.training.lr == "auto":
            lr = federation.training.optimizer_spec.lr
            self.listener.on_note(f"training.lr is {lr:g}, by a range test ({self.run_folder.learning_rate.name})")
        if progress is None:
            with without_stacking_plan(engine):
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
            for note in (describe_refusal(engine), federation.get_note()):
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
            progress = self._begin_at_random()
            self.seconds += time.monotonic() - started
            if self.start_scores:
                self.listener.on_start_scores(self.start_scores)
            return progress
        try:
            progress = start_head(prepared.federation, prepared.federation.begin(), prepared.head)
            row = {
                **{"round": 0, "head_init": prepared.head.kind, "simulated": prepared.partition is not None},
                **self._measure_progress(progress),
            }
        except TooFewReplies as error:
            if prepared.partition is not None and prepared.config.model.head_init != "auto":
                remedy = "Fix the cause and resume, or start a run with model.head_init: auto"
                raise error.relocate("model.head_init", note=remedy) from None
            reason = f"{error.problem}"
            self.listener.on_note(f"the head starts at random: {reason}")
            progress = self._begin_at_random()
            row = {"round": 0, "head_init": "random", "reason": reason, **self.start_scores}
        self.seconds += time.monotonic() - started
        result = RoundResult(progress, transfers=(), cohort=(), lr=0.0, loss=math.nan)
        return self._commit(result, {**row, "seconds": self.seconds})

    def _begin_at_random(self) -> Progress:
        """Return the progress before the first round, with the head as loaded; it is rated in simulations."""
        federation = self.prepared.federation
        if isinstance(federation.method, HeadRounds):
            self.listener.on_note(f"rounds 1 to {federation.method.rounds} train the head alone (model.head_rounds)")
        progress = begin_at_random(federation)
        if self.prepared.partition is not None:  # nodes would need another exchange
            self.start_scores, _ = self._evaluate(progress)
        return progress

    def _is_finished(self, progress: Progress) -> bool:
        """Check whether all rounds are finished, or something ends the run before its last round."""
        return (
            progress.state.round >= self.prepared.federation.settings.rounds or self.explain_stop(progress) is not None
        )

    def explain_stop(self, progress: Progress) -> str | None:
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
            is_start = progress.state.round == 0
            with record_items(prepared, self.run_folder, "start") if is_start else nullcontext() as record:
                heldout = prepared.evaluator.evaluate_heldout(progress, prepared.test, on_predictions=record)
            scores["test"] = dict(heldout["global"])
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
        self.record(number, (*result.transfers, *events.transfers))
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
                states=progress.states,
                last_rounds=progress.last_rounds,
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

    def record(self, round: int, transfers: Iterable[Transfer]) -> None:
        """Enter transfers of a round into the ledger."""
        for transfer in transfers:
            self.ledger.record(
                round, transfer.client, transfer.direction, transfer.bytes, transfer.payload, transfer.purpose
            )
