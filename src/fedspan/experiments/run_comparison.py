"""Comparison of methods: its runs, and the table in its folder."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from matplotlib.axes import Axes
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedspan.config import ConfigLike, to_plain_values
from fedspan.experiments.comparison import CompareReport, Comparison, build_report, get_heldout_score, plan_comparison
from fedspan.experiments.execution import format_command_line, open_series, read_settings, run_step
from fedspan.experiments.series import Watcher, get_finite
from fedspan.experiments.series_bar import open_watcher
from fedspan.experiments.tables import write_tables
from fedspan.files import convert_disk_errors, write_atomic
from fedspan.logs import read_lines
from fedspan.run_folder import RunFolder
from fedspan.tasks.metrics import METRICS
from fedspan.training.prefix_rows import share_prefixes
from fedspan.transports.ray.sharing import share_teams

COMPARE = "compare.yaml"
_SETTINGS = {"command": list, "methods": list, "seeds": list, "against": (str, type(None)), "for": dict, "config": dict}


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


# Okabe and Ito's colors, which most color-blind people can distinguish; lines also differ in their dashes.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
_DASHES = ("solid", "dashed", "dashdot", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
_LEVELS = {"centralized": (0, (8, 2)), "local-only": "dotted"}

Curve = Mapping[int, tuple[float, float]]
"""Megabytes and score by round, of one run."""


def write_figure(comparison: Comparison, report: CompareReport, path: Path) -> None:
    """Write the figure of a comparison as a PDF."""
    content = io.BytesIO()
    # Without a date, the same runs give the same file.
    draw_comparison(comparison, report).savefig(content, format="pdf", metadata={"CreationDate": None})
    with convert_disk_errors(path.parent):
        write_atomic(path, content.getvalue())


def draw_comparison(comparison: Comparison, report: CompareReport) -> Figure:
    """Draw the mean score over the seeds by round, and by bytes in both directions; bands reach from least to most."""
    figure = Figure(figsize=(7.0, 2.8), layout="constrained")
    FigureCanvasPdf(figure)
    panels: tuple[Axes, Axes] = figure.subplots(1, 2, sharey=True)
    factor = 100 if METRICS[report.metric].is_percentage else 1
    for index, key in enumerate(comparison.methods):
        curves = [
            _read_curve(Path(report.folder) / step.name, report) for step in comparison.steps if step.group == key
        ]
        rounds = sorted(set[int].intersection(*(set(curve) for curve in curves)))
        columns = [[curve[number][1] * factor for curve in curves] for number in rounds]
        megabytes = [sum(curve[number][0] for curve in curves) / len(curves) for number in rounds]
        color, dash = _COLORS[index % len(_COLORS)], _DASHES[index % len(_DASHES)]
        for axes, position in zip(panels, (rounds, megabytes), strict=True):
            means = [sum(column) / len(column) for column in columns]
            axes.plot(position, means, color=color, linestyle=dash, linewidth=1.2, label=key)
            axes.fill_between(
                position, [*map(min, columns)], [*map(max, columns)], color=color, alpha=0.15, linewidth=0
            )
    levels = {row.name: row.mean for row in report.rows if row.name in _LEVELS and row.mean is not None}
    for name, level in levels.items():
        for axes in panels:
            axes.axhline(level * factor, color="#444444", linestyle=_LEVELS[name], linewidth=0.8, label=name)
    _label(panels, report.build_table().head[1])
    return figure


def _read_curve(folder: Path, report: CompareReport) -> Curve:
    curve: dict[int, tuple[float, float]] = {}
    for row in cast("Iterable[Mapping[str, Any]]", read_lines(RunFolder(folder).metrics)):
        score = get_finite(row.get(report.measured), report.metric)
        if score is not None:
            curve[row["round"]] = (row["bytes"]["down"] + row["bytes"]["up"]) / 1e6, score
    return curve


def _label(panels: Sequence[Axes], quantity: str) -> None:
    for axes, title in zip(panels, ("round", "megabytes, both ways"), strict=True):
        axes.set_xlabel(title, fontsize=8)
        axes.tick_params(labelsize=7)
        axes.grid(color="#dddddd", linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel(quantity, fontsize=8)
    panels[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[1].legend(fontsize=7, frameon=False)
