"""The end of a run: scores and export of its best round, baselines, and the report."""

from __future__ import annotations

from dataclasses import replace

from fedspan.federation.progress import Progress
from fedspan.files import convert_disk_errors, fsync_tree, remove
from fedspan.logs import read_lines
from fedspan.runs.baselines import train_baseline
from fedspan.runs.callbacks import sample_predictions
from fedspan.runs.checkpoint_format import load as load_checkpoint
from fedspan.runs.failures import count_failures
from fedspan.runs.final_rounds import finish_training
from fedspan.runs.integrity import describe_config
from fedspan.runs.learning_rate import read_range_test
from fedspan.runs.model_card import RunReport, format_final_rounds, write_cards
from fedspan.runs.records import compute_result_digests
from fedspan.runs.report_warnings import find_divergence, find_limited
from fedspan.runs.session import Session
from fedspan.runs.trained_models import write_adapters
from fedspan.tasks.losses import compute_guess_loss

_START = ("head_init", "simulated", "reason", "validation", "clients", "test")
"""Parts of the line of a start in metrics.jsonl that a report has."""


def finish(session: Session, progress: Progress) -> RunReport:
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
                prepared.federation.training.optimizer.lr,
                compute_guess_loss(prepared.task),
                session.start_scores,
            ),
            *find_limited(read_lines(run_folder.metrics)),
        ),
        by_value=final.by_value,
        start={key: value for key, value in start.items() if key in _START},
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
