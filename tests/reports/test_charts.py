"""Numbers of charts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason="the extra fedspan[report] is not installed")


from fedspan.reports import charts
from fedspan.reports.groups import group_runs, list_distinguishing_settings, summarize_curve
from fedspan.reports.page import PageContent, render_page
from fedspan.reports.run_data import read_runs
from fedspan.reports.summary import format_score_with_unit
from helpers.compared_runs import compare_run, figures


def test_baselines_are_level_lines_rows_and_marks_of_every_client(series: Path) -> None:
    first, _, other, _ = read_runs([series])
    compared = compare_run(first, 0.975, start=0.971, local=0.606, centralized=0.972)
    groups = group_runs([compared, other])
    figure = charts.draw_course(groups, {run.name: {1: 0.5, 2: 0.6} for run in (compared, other)}, "", True, True)
    lines = {line.get("name"): line["y"] for line in json.loads(figure.to_json() or "")["data"]}
    assert lines["fedit: local only"] == [0.606, 0.606]
    assert lines["fedit: centralized"] == [0.972, 0.972]
    assert not any(name.startswith("ffa-lora:") for name in lines)
    text = render_page(groups[:1], PageContent(), "title", "version")
    for name, score in (("start", "97.1 %"), ("local only", "60.6 %"), ("centralized", "97.2 %")):
        assert f"<tr><td>fedit: {name}</td><td>0</td><td>{score}</td>" in text
    (clients,) = [figure for figure in figures(text) if figure["data"][0].get("mode") == "markers"]
    assert [marks["name"] for marks in clients["data"]] == ["fedit", "local only", "centralized"]


def test_lines_are_told_apart_without_color(text: str) -> None:
    lines = [trace for trace in figures(text)[0]["data"] if "name" in trace]
    assert len({(trace["line"]["dash"], trace["marker"]["symbol"]) for trace in lines}) == len(lines) == 2
    bars = figures(text)[4]["data"]
    assert len({bar["marker"]["pattern"]["shape"] for bar in bars}) == len(bars)


def test_numbers_are_those_of_the_runs(series: Path, text: str) -> None:
    runs = read_runs([series])
    assert [run.name for run in runs] == sorted(one.parent.name for one in series.glob("*/report.json"))
    groups = group_runs(runs)
    assert [[run.config.seed for run in group.runs] for group in groups] == [[0, 1], [0, 1]]
    assert {group.label for group in groups} == {"fedit", "ffa-lora"}
    assert set(list_distinguishing_settings([group.runs[0] for group in groups])) == {"method.name"}
    for group in groups:
        made = summarize_curve(group, {run.name: charts.get_scores(run) for run in group.runs})
        assert made.rounds == (1, 2, 3)
        for run in group.runs:
            assert run.report is not None
            assert run.bytes == sum(run.report.bytes.values())
            assert run.final == run.report.scores["test"]["accuracy"]
        assert made.bytes[-1] == sum(run.bytes for run in group.runs) / 2
        assert made.seconds[0] < made.seconds[-1]
        assert all(low <= mean <= high for low, mean, high in zip(made.low, made.mean, made.high, strict=True))
        assert format_score_with_unit("accuracy", group.runs[0].final) in text
    buttons = figures(text)[0]["layout"]["updatemenus"][0]["buttons"]
    assert [button["label"] for button in buttons] == ["by rounds", "by bytes", "by time"]
    assert all(len(button["args"][0]["x"]) == len(figures(text)[0]["data"]) for button in buttons)
