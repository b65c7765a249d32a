"""Matrix figures: clients by label, clients by round, and layers by round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from fedspan.data.partition import ClientRow
from fedspan.diagnostics.measures import MEASURES
from fedspan.reports.charts import (
    ABSENT,
    MAX_LISTED_CLIENTS,
    Figure,
    build_menu,
    compute_tick_step,
    shorten_layers,
    style,
)
from fedspan.reports.run_data import RunData
from fedspan.runs.predictions import Items


def partition(rows: Sequence[ClientRow], labels: Sequence[str]) -> Figure:
    """Draw the number of examples of every label, with one row for each client."""
    shares = [[count / max(1, sum(row.counts)) for count in row.counts] for row in rows]
    figure = go.Figure(
        go.Heatmap(
            z=shares,
            x=list(labels),
            y=[row.id for row in rows],
            customdata=[row.counts for row in rows],
            hovertemplate="%{y}: %{customdata} of %{x} (%{z:.0%})<extra></extra>",
            colorscale="Cividis",
            colorbar={"title": "share", "tickformat": ".0%"},
            text=[[str(count) if len(labels) <= 12 else "" for count in row.counts] for row in rows],
            texttemplate="%{text}",
        )
    )
    figure.update_yaxes(type="category", autorange="reversed")
    figure.update_xaxes(type="category")
    return style(figure, height=min(1200, max(280, 20 * len(rows) + 160)))


def draw_confusion(items: Items) -> Figure:
    """Draw how often each true class (rows) is predicted as each class (columns), as shares of the true class."""
    names, count = list(items.labels), len(items.labels)
    pairs = items.targets * count + items.predicted  # of every model
    counts = np.bincount(pairs.reshape(-1), minlength=count**2).reshape(count, count)
    figure = go.Figure(
        go.Heatmap(
            z=(counts / np.maximum(counts.sum(1, keepdims=True), 1)).tolist(),
            x=names,
            y=names,
            zmin=0,
            zmax=1,
            customdata=counts.tolist(),
            hovertemplate="%{y} as %{x}: %{customdata} (%{z:.0%})<extra></extra>",
            colorscale="Cividis",
            colorbar={"title": "share", "tickformat": ".0%"},
            text=[[str(cell) if cell and count <= 12 else "" for cell in row] for row in counts.tolist()],
            texttemplate="%{text}",
        )
    )
    figure.update_yaxes(type="category", autorange="reversed", title="true")
    figure.update_xaxes(type="category", title="predicted")
    return style(figure, height=min(1200, max(320, 18 * count + 180)))


def draw_participation(run: RunData) -> Figure:
    """Draw the clients that participated in every round, and those whose reply failed."""
    ids = list(dict.fromkeys(id for row in run.rows for id in (*row.get("cohort", ()), *_list_failed_clients(row))))
    ids.sort()
    rows = [row for row in run.rows if row["round"]]
    rounds = [int(row["round"]) for row in rows]
    marks = [["" for _ in rounds] for _ in ids]
    z: list[list[float]] = [[0.0 for _ in rounds] for _ in ids]
    positions = {id: index for index, id in enumerate(ids)}
    for column, row in enumerate(rows):
        for id in row.get("cohort", ()):
            z[positions[id]][column], marks[positions[id]][column] = 1.0, "participated"
        for id in _list_failed_clients(row):
            z[positions[id]][column], marks[positions[id]][column] = 0.5, "failed"
    figure = go.Figure(
        go.Heatmap(
            z=z,
            x=rounds,
            y=ids,
            zmin=0,
            zmax=1,
            xgap=1,
            ygap=1,
            showscale=False,
            colorscale=[[0, ABSENT], [0.5, "#d55e00"], [1, "#0072b2"]],
            customdata=marks,
            text=[["x" if mark == "failed" else "" for mark in line] for line in marks],
            texttemplate="%{text}",
            hovertemplate="%{y}, round %{x}: %{customdata}<extra></extra>",
        )
    )
    figure.update_xaxes(title="round", dtick=compute_tick_step(len(rounds)))
    figure.update_yaxes(type="category", autorange="reversed", showticklabels=len(ids) <= MAX_LISTED_CLIENTS)
    return style(figure, height=min(1000, max(240, 16 * len(ids) + 140)))


def _list_failed_clients(row: Mapping[str, Any]) -> list[str]:
    return [str(item["client"]) for item in row.get("failures", ()) if isinstance(item, Mapping) and "client" in item]


def draw_rounds(run: RunData) -> Figure | None:
    """Draw every diagnostic of a run by round and layer, from metrics.jsonl; a menu selects the diagnostic."""
    by_number = {int(row["round"]): row["diagnostics"]["layers"] for row in run.rows if "diagnostics" in row}
    layers = list(dict.fromkeys(name for layer_values in by_number.values() for name in layer_values))
    measures = [
        candidate
        for candidate in MEASURES
        if any(candidate.key in layer_values[name] for layer_values in by_number.values() for name in layer_values)
    ]
    if not measures:
        return None
    figure, buttons = go.Figure(), list[dict[str, Any]]()
    for number, measure in enumerate(measures):
        figure.add_heatmap(
            z=[[layer_values.get(name, {}).get(measure.key) for layer_values in by_number.values()] for name in layers],
            x=list(by_number),
            y=shorten_layers(layers),
            hovertext=[[name] * len(by_number) for name in layers],
            visible=number == 0,
            colorscale="Cividis",
            colorbar={"exponentformat": "e", "thickness": 12},
            xgap=1,
            ygap=1,
            texttemplate="%{z:.2g}" if len(by_number) <= 12 else None,
            hovertemplate="%{hovertext}, round %{x}: %{z:.4g}<extra></extra>",
        )
        visible = [index == number for index in range(len(measures))]
        buttons.append({"label": measure.title, "method": "update", "args": [{"visible": visible}]})
    figure.update_layout(updatemenus=[{**build_menu(buttons), "type": "dropdown", "direction": "down"}])
    figure.update_xaxes(title="round", type="category")
    figure.update_yaxes(type="category", autorange="reversed", tickfont={"size": 10})
    return style(figure, height=min(1400, max(320, 20 * len(layers) + 180)))
