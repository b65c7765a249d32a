"""Comparison of methods: its runs, and the table in its folder."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedspan.config import ConfigLike, to_plain_values
from fedspan.experiments.comparison import CompareReport, build_report, get_heldout_score, plan_comparison
from fedspan.experiments.execution import format_command_line, open_series, read_settings, run_step
from fedspan.experiments.figures import write_figure
from fedspan.experiments.series_bar import open_watcher
from fedspan.experiments.tables import write_tables
from fedspan.experiments.watcher import Watcher
from fedspan.training.prefix_rows import share_prefixes
from fedspan.transports.ray.sharing import share_teams

COMPARE = "compare.yaml"
_SETTINGS = {
    "command": list,
    "methods": list,
    "seeds": list,
    "against": (str, type(None)),
    "for": dict,
    "config": dict,
}


def compare(
    config: ConfigLike,
    folder: str | Path,
    methods: Sequence[str],
    seeds: Sequence[int] = (0, 1, 2),
    *,
    overrides: Sequence[str] = (),
    overrides_for: Mapping[str, Sequence[str]] | None = None,
    against: str | None = None,
    listener: Watcher | None = None,
    progress: bool | None = None,
) -> CompareReport:
    """Run several methods and seeds on the same partition and summarize them in one table.

    Every run is an ordinary run in ``folder/<method>-seed<seed>``. A finished run is read and an unfinished run is
    resumed. A stopped comparison therefore continues, and a finished one can be extended by more seeds or methods.

    Args:
        config: The path of a YAML file, its content as plain values, or a ``RunConfig``. The ``method`` section may
            hold options that only some of the methods have. The config's baselines are trained once for each seed,
            in the runs of the first method.
        folder: Folder of the runs, the tables and the figure; empty, not yet existing, or of this comparison.
        methods: Registry keys of the methods.
        seeds: Seeds of every method. ``partition.seed`` is the first of them unless the config sets it.
        overrides: Changes to the config, each ``section.field=value``.
        overrides_for: Changes for one method, by its key, such as ``{"fedloru": ["method.tau=5"]}``.
        against: The reference row of the table; by default the first method.
        listener: The listener that is notified of every event.
        progress: Whether to show progress bars on standard error; None: if that is a terminal, or in a notebook.

    Returns:
        The scores of each method over the seeds, and its differences from the reference row.

    Examples:
        >>> report = fedspan.compare("config.yaml", "runs/two", ["fedit", "rolora"], seeds=[0, 1, 2])
        >>> report.best

    Raises:
        FedspanError: If the input is invalid in a way that the user can correct.
    """
    settings = {
        "command": format_command_line(sys.argv),
        "methods": list(methods),
        "seeds": list(seeds),
        "against": against,
        "for": {key: list(texts) for key, texts in (overrides_for or {}).items()},
        "config": to_plain_values(config, overrides),
    }
    with open_watcher(listener, progress) as watcher:
        return _run(settings, Path(folder), watcher)


def resume_compare(
    folder: str | Path, *, against: str | None = None, listener: Watcher | None = None, progress: bool | None = None
) -> CompareReport:
    """Resume a comparison with its original settings.

    Args:
        folder: Folder of the comparison.
        against: Another reference row; by default the original one.
        listener: The listener that is notified of every event.
        progress: Whether to show progress bars on standard error; None: if that is a terminal, or in a notebook.

    Returns:
        The report, as of ``compare``.

    Examples:
        >>> fedspan.resume_compare("runs/two", against="rolora")

    Raises:
        FedspanError: If the folder holds no comparison, and as ``compare`` does.
    """
    settings = read_settings(Path(folder), COMPARE, _SETTINGS)
    with open_watcher(listener, progress) as watcher:
        return _run({**settings, "against": against or settings["against"]}, Path(folder), watcher)


def _run(settings: Mapping[str, Any], folder: Path, watcher: Watcher) -> CompareReport:
    plan = plan_comparison(
        settings["config"], settings["methods"], settings["seeds"], settings["for"], settings["against"]
    )
    open_series(folder, COMPARE, settings, plan.steps)
    watcher.on_series_start(plan.steps)
    with share_prefixes(), share_teams():
        reports = {step.name: run_step(step, folder, watcher, get_heldout_score) for step in plan.steps}
    report = build_report(plan, reports, str(folder))
    title = f"Comparison of {', '.join(plan.methods)}"
    names = [step.name for step in plan.steps]
    write_tables(
        folder, title, report.build_table(), report.to_rows(), settings["command"], names, report.tabulate_seeds()
    )
    write_figure(plan, report, folder / "figure.pdf")
    return report
