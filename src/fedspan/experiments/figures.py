"""Figure of a comparison for a paper: the score by round and by traffic."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from matplotlib.axes import Axes
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedspan.experiments.comparison import CompareReport, Comparison
from fedspan.experiments.series import get_finite
from fedspan.files import convert_disk_errors, write_atomic
from fedspan.logs import read_lines
from fedspan.run_folder import RunFolder
from fedspan.tasks.metrics import METRICS

# Okabe and Ito's colors, which most color-blind people can distinguish; lines also differ in their dashes.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
_DASHES = ("solid", "dashed", "dashdot", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
_LEVELS = {"centralized": (0, (8, 2)), "local-only": "dotted"}

Curve = Mapping[int, tuple[float, float]]
"""Megabytes and score by round, of one run."""


def write_figure(comparison: Comparison, report: CompareReport, path: Path) -> None:
    """Write the figure of a comparison as a PDF.

    Args:
        comparison: The plan of the comparison, whose runs are finished.
        report: Its table.
        path: Path of the PDF.
    """
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
    """Read the scores of a run's rounds that were measured."""
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
