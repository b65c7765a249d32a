"""The page of a run and of a series: what stands in it is what the runs' folders hold, and it needs no network."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedspan
from fedspan import FedspanError
from helpers import tiny

pytest.importorskip("plotly", reason="the extra fedspan[report] is not installed")

from fedspan.reports import charts
from fedspan.reports.groups import group_runs, list_differences, summarize_curve
from fedspan.reports.run_data import read_runs
from fedspan.reports.summary import format_score
from helpers.compared_runs import figures

LIMIT = 7_000_000


@pytest.fixture(scope="module")
def text(series: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = fedspan.report(series, tmp_path_factory.mktemp("pages") / "report.html", diagnostics=True)
    assert out.stat().st_size < LIMIT
    return out.read_text(encoding="utf-8")


def body(text: str) -> str:
    """Without plotly's own script."""
    return re.sub(r"<script>(?!\nconst figures).*?</script>", "", text, flags=re.DOTALL)


def test_every_section_is_there_and_every_figure_has_a_place(text: str) -> None:
    own = body(text)
    for title in ("Runs", "Score", "Training loss", "Clients", "Labels by client", "Traffic", "Participation"):
        assert f"<h2>{title}</h2>" in own
    for title in ("Diagnostics", "Singular values of the update", "Configuration"):
        assert f"<h2>{title}</h2>" in own
    made = figures(text)
    assert len(made) == own.count('class="figure"') == 8
    assert all(figure["data"] for figure in made)


def test_nothing_is_loaded_from_elsewhere(text: str) -> None:
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=[\"'](?!data:)", body(text))
    assert text.count("plotly.js v") == 1


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
    assert set(list_differences([group.runs[0] for group in groups])) == {"method.name"}
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
        assert format_score("accuracy", group.runs[0].final) in text
    buttons = figures(text)[0]["layout"]["updatemenus"][0]["buttons"]
    assert [button["label"] for button in buttons] == ["by rounds", "by bytes", "by time"]
    assert all(len(button["args"][0]["x"]) == len(figures(text)[0]["data"]) for button in buttons)


def test_a_run_at_work_and_data_that_are_gone(series: Path, tmp_path: Path) -> None:
    run = tmp_path / "<b>run"
    run.mkdir()
    for name in ("config.yaml", "environment.json", "metrics.jsonl", "ledger.jsonl", "partition.json"):
        (run / name).write_bytes((series / "fedit-seed0" / name).read_bytes())
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("corpus.csv", "gone.csv"))
    text = fedspan.report(run, tmp_path / "page.html").read_text()
    assert "after round 3" in text
    assert "Labels by client" not in text
    assert "Singular values" not in text
    assert "<b>run" not in body(text)
    (run / "metrics.jsonl").write_text("")
    text = fedspan.report(run, tmp_path / "page.html").read_text()
    assert "after round 0" in text
    assert "nan" not in re.findall(r"\w+", body(text))


def test_mistakes(series: Path, tiny_folder: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    assert "the folder of a run, or a folder with runs in it" in refused("report", tmp_path)
    other = tmp_path / "other"
    fedspan.run(tiny.config(tiny_folder, evaluation={"metric": "macro_f1"}, federation={"rounds": 1}), other)
    with pytest.raises(
        FedspanError,
        match=r"is judged by accuracy, and other by macro_f1\. Expected runs that are judged by one metric",
    ):
        fedspan.report([series, other], tmp_path / "page.html")
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(FedspanError, match=r"`out`: '.*file' cannot be used: File exists\. Choose another file\."):
        fedspan.report(series, blocked / "page.html", data=False)


def test_the_command(series: Path, tmp_path: Path, call: Callable[..., Any]) -> None:
    result = call("report", series, "--out", tmp_path / "page.html", "--no-data")
    assert result.exit_code == 0, result.output
    assert "wrote" in result.output
    assert "MB)" in result.output
