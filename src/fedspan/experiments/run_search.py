"""Hyperparameter search: trials over a grid or at random, and a config with the best settings by validation."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from fedspan.config import ConfigLike, to_plain_values
from fedspan.errors import FedspanError
from fedspan.experiments.execution import format_command_line, open_series, read_settings, run_step
from fedspan.experiments.search import Sweep, SweepReport, get_validation_score, plan_sweep, rank_trials
from fedspan.experiments.series import Step, Watcher
from fedspan.experiments.series_bar import open_watcher
from fedspan.experiments.tables import write_tables
from fedspan.files import convert_disk_errors, write_atomic
from fedspan.run_folder import RunFolder
from fedspan.runs.report import RunReport
from fedspan.tasks.metrics import METRICS
from fedspan.training.prefix_rows import share_prefixes
from fedspan.transports.ray.sharing import share_teams

SWEEP = "sweep.yaml"
BEST = "best.yaml"
_FAILURES = "failures.json"
_SETTINGS = {
    "command": list,
    "over": dict,
    "trials": (int, type(None)),
    "rounds": (int, type(None)),
    "seeds": list,
    "config": dict,
}


def sweep(
    config: ConfigLike,
    folder: str | Path,
    over: Mapping[str, str | Sequence[Any]],
    *,
    trials: int | None = None,
    rounds: int | None = None,
    seeds: Sequence[int] = (0,),
    overrides: Sequence[str] = (),
    listener: Watcher | None = None,
    progress: bool | None = None,
) -> SweepReport:
    """Try settings and select the best by the metric on the clients' validation parts, never by a test set.

    Every run is an ordinary run in ``folder/trial-<number>-seed<seed>``, without the config's baselines. A trial whose
    training diverges has failed and is never selected. A stopped sweep can be resumed.

    Args:
        config: The path of a YAML file, its content as plain values, or a ``RunConfig``.
        folder: Folder of the runs, the tables and ``best.yaml``; empty, not yet existing, or of this sweep.
        over: The search space, by path in the config: values, or a string as on the command line, ``4,8`` or
            ``1e-4..1e-1``. A range of integers is sampled uniformly, one of other numbers (above 0) log-uniformly.
        trials: Number of combinations to draw, by the config's seed; by default all of them, without ranges.
        rounds: Number of rounds of a trial; by default the config's. ``best.yaml`` keeps the config's number.
        seeds: Seeds of every trial, whose mean score is compared. ``partition.seed`` is the first unless the config
            sets it.
        overrides: Changes to the config, each ``section.field=value``.
        listener: The listener that is notified of every event.
        progress: Whether to show progress bars on standard error; None: if that is a terminal, or in a notebook.

    Returns:
        The trials with their scores, and the best one.

    Examples:
        >>> report = fedspan.sweep("config.yaml", "runs/sweep", {"training.lr": "1e-4..1e-1"}, trials=8)
        >>> report.best

    Raises:
        FedspanError: If the input is invalid in a way that the user can correct.
    """
    settings = {
        "command": format_command_line(sys.argv),
        "over": {path: values if isinstance(values, str) else list(values) for path, values in over.items()},
        "trials": trials,
        "rounds": rounds,
        "seeds": list(seeds),
        "config": to_plain_values(config, overrides),
    }
    with open_watcher(listener, progress) as watcher:
        return _run(settings, Path(folder), watcher)


def resume_sweep(folder: str | Path, *, listener: Watcher | None = None, progress: bool | None = None) -> SweepReport:
    """Resume a sweep with its original settings.

    Args:
        folder: Folder of the sweep.
        listener: The listener that is notified of every event.
        progress: Whether to show progress bars on standard error; None: if that is a terminal, or in a notebook.

    Returns:
        The report, as of ``sweep``.

    Examples:
        >>> fedspan.resume_sweep("runs/sweep")

    Raises:
        FedspanError: If the folder holds no sweep, and as ``sweep`` does.
    """
    settings = read_settings(Path(folder), SWEEP, _SETTINGS)
    with open_watcher(listener, progress) as watcher:
        return _run(settings, Path(folder), watcher)


def _run(settings: Mapping[str, Any], folder: Path, watcher: Watcher) -> SweepReport:
    plan = plan_sweep(settings["config"], settings["over"], settings["trials"], settings["rounds"], settings["seeds"])
    open_series(folder, SWEEP, settings, plan.steps)
    watcher.on_series_start(plan.steps)
    with share_prefixes(), share_teams():
        reports, failures = _run_trials(plan, folder, watcher)
    trials = rank_trials(plan, reports, failures)
    best = None if trials[0].failed else folder / BEST
    higher = METRICS[plan.metric].greater_is_better
    report = SweepReport(plan.metric, higher, plan.seeds, trials, str(folder), None if best is None else str(best))
    if best is not None:
        values = plan.configs[trials[0].number - 1].model_dump(mode="json")
        with convert_disk_errors(folder):
            write_atomic(best, yaml.safe_dump(values, sort_keys=False, allow_unicode=True).encode())
    names = [step.name for step in plan.steps if step.name in reports]
    title = f"Sweep over {', '.join(trials[0].values)}"
    write_tables(folder, title, report.build_table(), report.to_rows(), settings["command"], names)
    return report


def _run_trials(plan: Sweep, folder: Path, watcher: Watcher) -> tuple[dict[str, RunReport], dict[str, str]]:
    """Execute all runs except those of trials that failed for an earlier seed; failures are stored and not repeated."""
    run_folder = RunFolder(folder)
    path = folder / _FAILURES
    failures = cast(dict[str, str], run_folder.read_json(path)) if path.is_file() else {}
    reports: dict[str, RunReport] = {}
    lost: set[str] = set()
    for step in plan.steps:
        if step.group in lost:
            continue
        if step.name not in failures:
            try:
                reports[step.name] = _require_validation(step, run_step(step, folder, watcher, get_validation_score))
                continue
            except FedspanError as error:
                if error.field != "training.lr":  # the one error of training itself: divergence
                    raise
                failures[step.name] = str(error)
                run_folder.write_json(path, failures)
        lost.add(step.group)
        watcher.on_run_failure(step, failures[step.name])
    return reports, failures


def _require_validation(step: Step, report: RunReport) -> RunReport:
    if "validation" not in report.scores:
        share = step.config.partition.validation
        raise FedspanError("partition.validation", share, "a share that leaves a client examples to validate on")
    return report
