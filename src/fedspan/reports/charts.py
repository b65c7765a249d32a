"""Figures of the report.

Colors are ones that most people can distinguish, and never the only cue: lines differ in dashes and markers, bars in
patterns.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import plotly.graph_objects as go

from fedspan.diagnostics.measures import MEASURES
from fedspan.diagnostics.round_diagnosis import Diagnosis
from fedspan.reports.groups import Curve, RunGroup, summarize_curve
from fedspan.reports.run_data import RunData
from fedspan.tasks.metrics import METRICS

Figure = go.Figure
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8f7a00", "#56b4e9", "#6b4c9a", "#444444")
"""Okabe and Ito's colors, which most color-blind people can distinguish, darkened where they were pale."""
ABSENT = "#eeeeee"
"""Color of a client's cell in a round without it."""
ON_DARK = {"#6b4c9a": "#a98be0", "#444444": "#bbbbbb", ABSENT: "#2a313a"}
"""Colors that are hard to see on a dark page, or too bright for it, and what replaces them there."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MARKS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "triangle-down")
PATTERNS = ("", "/", "x", ".", "-", "|", "+", "\\")
BASELINE_STYLES = {
    "local-only": ("#444444", "dot", "triangle-down-open"),
    "centralized": ("#444444", "longdash", "triangle-up-open"),
}
"""Color, dashes and marker of each baseline."""
SHARES = ".2~%"
"""Format of an axis of shares, with as many of two decimals as its ticks need."""
MAX_LISTED_CLIENTS = 60
"""Number of clients above which individual clients are not readable."""


def fade(color: str) -> str:
    """Return a translucent color for a band behind a line of the same color."""
    red, green, blue = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"


def build_menu(buttons: Sequence[Mapping[str, Any]], *, y: float = 1.02) -> dict[str, Any]:
    """Return a row of buttons above a figure."""
    place = {"x": 0, "xanchor": "left", "y": y, "yanchor": "bottom", "pad": {"b": 4}}
    return {"type": "buttons", "direction": "right", "buttons": list(buttons), "showactive": True, **place}


def compute_tick_step(last: int) -> int:
    """Return the whole number between two ticks of an axis from 0 to ``last``."""
    return max(1, math.ceil(last / 12))


def shorten_layers(names: Sequence[str]) -> list[str]:
    """Return layers without what precedes the number of a block in all that have one, or a phone has no room."""
    starts = {start[0] for name in names if (start := re.match(r"\D*\.(?=\d)", name))}
    return [name.removeprefix(*starts) for name in names] if len(starts) == 1 else list(names)


def style(figure: Figure, height: int = 420) -> Figure:
    """Apply the page's style to a figure and return it."""
    figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 10, "r": 10, "t": 60 if figure.layout["updatemenus"] else 15, "b": 10},  # menus are above
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
        font={"size": 13},
        hoverlabel={"namelength": -1},
        paper_bgcolor="rgba(0,0,0,0)",
    )
    figure.update_xaxes(automargin=True)
    figure.update_yaxes(automargin=True)
    return figure


def get_scores(run: RunData) -> dict[int, float]:
    """Return the scores by round."""
    return {int(row["round"]): score for row in run.rows if (score := run.score(row)) is not None}


def get_losses(run: RunData) -> dict[int, float]:
    """Return the training losses by round."""
    return {int(row["round"]): float(row["loss"]) for row in run.rows if isinstance(row.get("loss"), int | float)}


def get_validation(run: RunData) -> dict[int, float]:
    """Return the validation values by round of the metric that selects rounds."""
    metric = run.config.evaluation.get_selection_metric(run.metric)
    rows = {int(row["round"]): row.get("validation") or {} for row in run.rows}
    return {number: float(row[metric]) for number, row in rows.items() if isinstance(row.get(metric), int | float)}


def draw_course(
    groups: Sequence[RunGroup],
    values: Mapping[str, Mapping[int, float]],
    title: str,
    percent: bool,
    with_baselines: bool = False,
) -> Figure:
    """Draw a quantity by round; buttons replace rounds by bytes or time.

    Args:
        groups: The groups, each drawn as a line (mean over the seeds) and a band (minimum to maximum).
        with_baselines: Whether to draw the groups' baselines as level lines; the quantity is the score.
    """
    figure, curves = go.Figure(), [summarize_curve(group, values) for group in groups]
    axes = {"rounds": [], "bytes": [], "time": []}
    for index, (group, summary) in enumerate(zip(groups, curves, strict=True)):
        color = COLORS[index % len(COLORS)]
        if len(group.runs) > 1:
            _draw_band(figure, summary, color, group.label)
            _extend_axes(axes, summary, 2)
        mark = MARKS[index % len(MARKS)]
        _draw_line(figure, summary, group.label, color, DASHES[index % len(DASHES)], mark, percent)
        _extend_axes(axes, summary, 1)
    for group, summary in zip(groups, curves, strict=True) if with_baselines else ():
        for name, (color, dash, mark) in BASELINE_STYLES.items():
            if (score := group.references.get(name)) is not None:
                level = replace(summary, mean=(score,) * len(summary.rounds))
                _draw_line(figure, level, _title_baseline(group, name, len(groups)), color, dash, mark, percent)
                _extend_axes(axes, level, 1)
    titles = {"rounds": "round", "bytes": "megabytes transmitted, both ways", "time": "seconds of rounds"}
    if with_baselines:
        shown = [value for curve in curves for value in curve.mean]
        shown += [level for group in groups if (level := group.references.get("centralized")) is not None]
        locals_ = [level for group in groups if (level := group.references.get("local-only")) is not None]
        if (span := _compute_axis(shown, locals_)) is not None:
            figure.update_yaxes(range=span)
    tick = compute_tick_step(max((summary.rounds[-1] for summary in curves if summary.rounds), default=1))
    figure.update_xaxes(title=titles["rounds"], dtick=tick)
    figure.update_yaxes(title=title)
    if percent:  # a curve that stays at 100 % has an axis to 200 % otherwise
        figure.update_yaxes(tickformat=SHARES, autorangeoptions={"clipmax": 1.02})
    buttons: list[dict[str, Any]] = []
    for name, x in axes.items():
        axis = {"xaxis.title.text": titles[name], "xaxis.dtick": tick if name == "rounds" else None}
        buttons.append({"label": f"by {name}", "method": "update", "args": [{"x": x}, axis]})
    figure.update_layout(updatemenus=[build_menu(buttons)])
    return style(figure)


def _compute_axis(shown: Sequence[float], others: Sequence[float]) -> tuple[float, float] | None:
    """Return the axis of the contenders where other levels are so far away that their differences would vanish.

    Args:
        shown: Values that must be visible.
        others: Levels of local-only training, visible only within five times the range of the contenders.
    """
    if not shown or not others:
        return None
    low, high = min(shown), max(shown)
    spread = max(high - low, 1e-3 * max(abs(low), abs(high)))
    if all(low - 5 * spread <= level <= high + 5 * spread for level in others):
        return None
    return low - 0.1 * spread, high + 0.1 * spread


def _draw_band(figure: Figure, curve: Curve, color: str, label: str) -> None:
    for edge, fill in ((curve.low, None), (curve.high, "tonexty")):
        figure.add_scatter(
            x=curve.rounds,
            y=edge,
            mode="lines",
            line={"width": 0, "color": color},
            fill=fill,
            fillcolor=fade(color),
            hoverinfo="skip",
            showlegend=False,
            legendgroup=label,
        )


def _draw_line(figure: Figure, curve: Curve, label: str, color: str, dash: str, mark: str, percent: bool) -> None:
    value = f"%{{y{':.1%' if percent else ':.4g'}}}"
    figure.add_scatter(
        x=curve.rounds,
        y=curve.mean,
        name=label,
        mode="lines+markers" if len(curve.rounds) <= 40 else "lines",
        line={"color": color, "dash": dash, "width": 2},
        marker={"symbol": mark, "size": 7},
        hovertemplate=f"{value} at %{{x}}<extra>{html.escape(label, quote=False)}</extra>",
    )


def _title_baseline(group: RunGroup, name: str, count: int) -> str:
    """Return a baseline's name in a legend; of several groups, with that of the group."""
    return name if count == 1 else f"{group.label}: {name}"


def _extend_axes(axes: Mapping[str, list[Any]], curve: Curve, times: int) -> None:
    for _ in range(times):
        axes["rounds"].append(list(curve.rounds))
        axes["bytes"].append([count / 1e6 for count in curve.bytes])
        axes["time"].append(list(curve.seconds))


def draw_clients(groups: Sequence[RunGroup], metric: str) -> Figure | None:
    """Draw every client's score on its own test part, worst at the bottom; for many clients, their distribution.

    The scores of baselines are beside those of the result.
    """
    scores: dict[str, dict[str, float]] = {}
    for group in groups:
        reports = [run.report for run in group.runs if run.report is not None]
        scores[group.label] = _average_by_client([report.by_client for report in reports], metric)
        for name in BASELINE_STYLES:
            if by_client := [report.baselines[name]["by_client"] for report in reports if name in report.baselines]:
                scores[_title_baseline(group, name, len(groups))] = _average_by_client(by_client, metric)
    ids = list(dict.fromkeys(id for client_scores in scores.values() for id in client_scores))
    if not ids:
        return None
    figure, percent = go.Figure(), METRICS[metric].is_percentage
    first = next(client_scores for client_scores in scores.values() if client_scores)
    if len(ids) > MAX_LISTED_CLIENTS:
        for index, (label, client_scores) in enumerate(scores.items()):
            pattern = {"shape": PATTERNS[index % len(PATTERNS)]}
            color = COLORS[index % len(COLORS)]
            figure.add_histogram(
                x=list(client_scores.values()),
                name=label,
                opacity=0.7,
                marker={"color": color, "pattern": pattern},
                nbinsx=30,
            )
        figure.update_layout(barmode="overlay")
        figure.update_yaxes(title="clients")
        figure.update_xaxes(title=METRICS[metric].title, tickformat=SHARES if percent else None)
        return style(figure)
    ids.sort(key=lambda id: first.get(id, float("-inf")) * (1 if METRICS[metric].greater_is_better else -1))
    for index, (label, client_scores) in enumerate(scores.items()):
        listed = [id for id in ids if id in client_scores]
        figure.add_scatter(
            x=[client_scores[id] for id in listed],
            y=listed,
            name=label,
            mode="markers",
            # open, so that equal scores do not hide one another
            marker={"color": COLORS[index % len(COLORS)], "symbol": f"{MARKS[index % len(MARKS)]}-open", "size": 10},
        )
    figure.update_xaxes(title=METRICS[metric].title, tickformat=SHARES if percent else None)
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=ids)
    return style(figure, height=max(300, 22 * len(ids) + 140))


def _average_by_client(by_client: Sequence[Mapping[str, Mapping[str, float]]], metric: str) -> dict[str, float]:
    """Return the mean score of every client over the runs that measured it."""
    scores_by_client: dict[str, list[float]] = {}
    for scores in by_client:
        for id, own_scores in scores.items():
            if metric in own_scores:
                scores_by_client.setdefault(id, []).append(float(own_scores[metric]))
    return {id: sum(values) / len(values) for id, values in scores_by_client.items()}


def draw_traffic(groups: Sequence[RunGroup]) -> Figure:
    """Draw the megabytes of a run, down and up."""
    figure = go.Figure()
    for index, direction in enumerate(("down", "up")):
        means = [sum(run.totals.run(direction).bytes for run in group.runs) / len(group.runs) / 1e6 for group in groups]
        figure.add_bar(
            x=means,
            y=[group.label for group in groups],
            orientation="h",
            name=f"{direction} ({'to' if direction == 'down' else 'from'} the clients)",
            marker={"color": COLORS[index], "pattern": {"shape": PATTERNS[index]}},
            text=[f"{value:.3g}" for value in means],
        )
    figure.update_layout(barmode="group")
    figure.update_xaxes(title="megabytes sent")
    figure.update_yaxes(type="category", autorange="reversed")
    return style(figure, height=max(240, 60 * len(groups) + 140))


def draw_privacy(runs: Sequence[RunData]) -> Figure | None:
    """Draw epsilon by round, and the budget."""
    figure = go.Figure()
    for index, run in enumerate(runs):
        epsilons = {
            int(row["round"]): float(row["privacy"]["epsilon"])
            for row in run.rows
            if isinstance(row.get("privacy"), Mapping) and isinstance(row["privacy"].get("epsilon"), int | float)
        }
        if epsilons:
            figure.add_scatter(
                x=list(epsilons),
                y=list(epsilons.values()),
                name=run.name,
                mode="lines+markers",
                line={"color": COLORS[index % len(COLORS)], "dash": DASHES[index % len(DASHES)]},
                marker={"symbol": MARKS[index % len(MARKS)]},
            )
    if not figure.data:
        return None
    figure.update_xaxes(title="round", dtick=compute_tick_step(max(run.rounds for run in runs)))
    figure.update_yaxes(title="epsilon spent", rangemode="tozero")
    return style(figure)


def draw_spectra(values: Mapping[str, Sequence[float]]) -> Figure | None:
    """Draw the singular values of an adapter's layers, relative to the largest one of each layer."""
    figure = go.Figure()
    for index, (layer, short) in enumerate(zip(values, shorten_layers(list(values)), strict=True)):
        spectrum = values[layer]
        if spectrum and spectrum[0] > 0:
            figure.add_scatter(
                x=list(range(1, len(spectrum) + 1)),
                y=[value / spectrum[0] for value in spectrum],
                name=short,
                hovertext=layer,
                mode="lines+markers",
                line={"width": 1, "color": COLORS[index % len(COLORS)], "dash": DASHES[index % len(DASHES)]},
                marker={"symbol": MARKS[index % len(MARKS)], "size": 5},
                showlegend=len(values) <= 12,
            )
    if not figure.data:
        return None
    figure.update_xaxes(title="singular value", dtick=compute_tick_step(max(map(len, values.values()))))
    figure.update_yaxes(title="by the layer's largest", rangemode="tozero")
    return style(figure)


def draw_layers(diagnoses: Mapping[str, Diagnosis]) -> Figure:
    """Draw every diagnostic by layer; a menu selects the diagnostic."""
    figure, buttons = go.Figure(), list[dict[str, Any]]()
    layers = list(dict.fromkeys(layer for diagnosis in diagnoses.values() for layer in diagnosis.layers))
    names, count = dict(zip(layers, shorten_layers(layers), strict=True)), len(diagnoses)
    for number, measure in enumerate(MEASURES):
        for index, (label, diagnosis) in enumerate(diagnoses.items()):
            values = {name: measure.value(layer) for name, layer in diagnosis.layers.items()}
            figure.add_scatter(
                x=list(values.values()),
                y=[names[layer] for layer in values],
                name=label,
                hovertext=list(values),
                mode="markers",
                visible=number == 0,
                marker={"color": COLORS[index % len(COLORS)], "symbol": MARKS[index % len(MARKS)], "size": 9},
            )
        visible = [number * count <= trace < (number + 1) * count for trace in range(len(MEASURES) * count)]
        args = [{"visible": visible}, {"xaxis.title.text": measure.title}]
        buttons.append({"label": measure.title, "method": "update", "args": args})
    figure.update_layout(updatemenus=[{**build_menu(buttons), "type": "dropdown", "direction": "down"}])
    figure.update_xaxes(title=MEASURES[0].title, rangemode="tozero", exponentformat="e")
    figure.update_yaxes(type="category", autorange="reversed", tickfont={"size": 10})
    return style(figure, height=min(1400, max(320, 20 * len(layers) + 180)))
