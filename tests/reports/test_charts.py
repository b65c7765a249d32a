"""Numbers of charts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason="the extra fedspan[report] is not installed")

from fedspan.reports import charts
from fedspan.reports.groups import group_runs
from fedspan.reports.page import OutOfRoundEvents, render_page
from fedspan.reports.run_data import read_runs
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
    text = render_page(groups[:1], OutOfRoundEvents(), "title", "version")
    for name, score in (("start", "97.1 %"), ("local only", "60.6 %"), ("centralized", "97.2 %")):
        assert f"<tr><td>fedit: {name}</td><td>0</td><td>{score}</td>" in text
    (clients,) = [figure for figure in figures(text) if figure["data"][0].get("mode") == "markers"]
    assert [marks["name"] for marks in clients["data"]] == ["fedit", "local only", "centralized"]
