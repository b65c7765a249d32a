"""A plot of the labels that each client holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedspan.data.partition import Partition

if TYPE_CHECKING:
    import datasets

MAX_BARS = 12
# Okabe and Ito's colors, distinguishable with any color vision, then four more for up to twelve labels.
_COLORS = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00",
    "#F0E442", "#000000", "#882255", "#999999", "#332288", "#DDCC77",
)  # fmt: skip
_LONGEST_NAME = 40
_ROW_HEIGHT = 0.23  # inches
_DIGIT_WIDTH = 0.055
_LARGEST = 40.0
_INK = "#333333"


def plot_partition(partition: Partition, labels: Sequence[str], dataset: datasets.Dataset, path: str | Path) -> None:
    """Plot how many examples of each label every client holds (training, validation and test together).

    Up to twelve labels are drawn as stacked bars, more as a heat map annotated with the counts.

    Args:
        path: Path of the PNG; its folder must exist.
    """
    rows = partition.label_table(labels, dataset)
    counts_CL = np.array([row.counts or (row.train + row.validation + row.test,) for row in rows])  # (clients, labels)
    labels = labels or ("examples",)
    clients = [_shorten(row.id) for row in rows]
    names = [_shorten(label) for label in labels]
    figure = Figure(layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw = _draw_bars if len(labels) <= MAX_BARS else _draw_heat_map
    draw(figure, axes, counts_CL, clients, names)
    title = f"{len(rows)} clients, {partition.examples:,} examples, {len(labels)} labels"
    axes.set_title(title, loc="left", fontsize=11, color=_INK)
    figure.savefig(path, format="png")


def _draw_bars(figure: Figure, axes: Axes, counts_CL: np.ndarray, clients: list[str], labels: list[str]) -> None:
    legend_rows = _ROW_HEIGHT * (len(labels) + 3)
    figure.set_size_inches(9.0, min(_LARGEST, max(1.2 + _ROW_HEIGHT * len(clients), legend_rows, 2.4)))
    position = np.arange(len(clients))
    start = np.zeros(len(clients), dtype=np.int64)
    for index, label in enumerate(labels):
        width = counts_CL[:, index]
        axes.barh(position, width, left=start, height=0.8, color=_COLORS[index], label=label, linewidth=0)
        start = start + width
    # The total at the end of each bar: a small client's bar is too short to be read off the axis.
    for row, total in enumerate(start):
        axes.annotate(
            f"{total:,}", (total, row), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7, color=_INK
        )
    axes.set_xlim(0, start.max() * 1.07)
    axes.set_xlabel("examples", fontsize=9, color=_INK)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    _format_client_axis(axes, clients)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(
        title="label", loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8, title_fontsize=9,
        alignment="left", borderaxespad=0.0,
    )  # fmt: skip


def _draw_heat_map(figure: Figure, axes: Axes, counts_CL: np.ndarray, clients: list[str], labels: list[str]) -> None:
    clients_count, labels_count = counts_CL.shape
    largest = int(counts_CL.max())
    width = min(_LARGEST, 3.5 + (0.12 + _DIGIT_WIDTH * len(str(largest))) * labels_count)
    height = min(_LARGEST, 3.2 + _ROW_HEIGHT * clients_count)
    figure.set_size_inches(width, height)
    # With a square-root scale, counts of one or two still differ from none next to a client with hundreds.
    norm = PowerNorm(0.5, vmin=0, vmax=max(1, largest))
    image = axes.imshow(counts_CL, aspect="auto", cmap=colormaps["Blues"], norm=norm, interpolation="nearest")
    fits = width < _LARGEST and height < _LARGEST
    if fits:
        for row, column in zip(*np.nonzero(counts_CL), strict=True):
            count = counts_CL[row, column]
            color = "white" if norm(count) > 0.5 else _INK
            text = axes.text(column, row, str(count), ha="center", va="center", fontsize=6, color=color)
            text.set_in_layout(False)  # thousands of boxes are slow to measure, and all are inside the axes
    step = 1 if fits else max(1, labels_count // 100)
    axes.set_xticks(range(0, labels_count, step), labels[::step], rotation=90, fontsize=7, color=_INK)
    axes.set_xlabel("label", fontsize=9, color=_INK)
    totals = counts_CL.sum(axis=1)
    _format_client_axis(axes, [f"{client} ({total:,})" for client, total in zip(clients, totals, strict=True)])
    # White lines between the cells.
    axes.set_xticks(np.arange(labels_count - 1) + 0.5, minor=True)
    axes.set_yticks(np.arange(clients_count - 1) + 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=0.8)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.03, aspect=30)
    bar.set_label("examples", fontsize=9, color=_INK)
    bar.ax.tick_params(labelsize=7)


def _format_client_axis(axes: Axes, clients: list[str]) -> None:
    step = max(1, len(clients) // 150)  # beyond that, even the largest plot has no room for every name
    axes.set_yticks(range(0, len(clients), step), clients[::step], fontsize=8, color=_INK)
    axes.set_ylim(len(clients) - 0.5, -0.5)  # the first client on top
    axes.tick_params(axis="y", length=0)


def _shorten(name: str) -> str:
    line = " ".join(name.split())
    if len(line) > _LONGEST_NAME:
        line = line[: _LONGEST_NAME - 1] + "…"
    # In matplotlib $ opens a formula, and a legend omits names that begin with an underscore.
    line = line.replace("$", r"\$")
    return f" {line}" if line.startswith("_") else line
