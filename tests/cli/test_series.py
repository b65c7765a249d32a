"""The live view of a series: a footer with the current run, and a line for each that has ended."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from fedspan.cli.series import SeriesView
from fedspan.config import RunConfig
from fedspan.experiments.series import Step
from fedspan.runs.setup import Prepared


@pytest.fixture
def series(prepared: Prepared) -> tuple[SeriesView, Console, Step]:
    out = Console(file=io.StringIO(), width=80, force_terminal=True, highlight=False, legacy_windows=False)
    shown = SeriesView(out, Path("runs/three"), lambda: 0.0)
    config: RunConfig = prepared.config
    step = Step("fedit-seed0", "fedit, seed 0", "fedit", 0, config)
    shown.on_series_start([step, step])
    return shown, out, step


def footer(shown: SeriesView) -> str:
    out = Console(file=io.StringIO(), width=80)
    out.print(shown.render_footer())
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def test_the_footer_has_the_run_and_its_round(series: tuple[SeriesView, Console, Step], prepared: Prepared) -> None:
    shown, out, step = series
    assert footer(shown).strip() == ""
    shown.on_run_start(step)
    assert "run 1 of 2: fedit, seed 0" in footer(shown)
    shown.on_start(prepared, 0, False)
    shown.on_client_finish(1, "north", 1.5)
    said = footer(shown)
    assert "round          1/3" in said
    assert "clients        1/3" in said
    assert "loss 1.5000" in said
    row = {"round": 1, "loss": 1.0, "seconds": 1.0, "bytes": {"down": 1, "up": 1}}
    shown.on_round_finish(row)
    assert "round          2/3" in footer(shown)
    shown.on_baseline_start("local", 3)
    shown.on_baseline_round("local", 2, 0.5)
    assert "local only       2/3" in footer(shown)
    shown.on_run_finish(step, "accuracy", 0.5, 61.0, True)
    assert "run 2 of 2" in footer(shown)
    for _ in range(2):
        shown.on_environment_change({"torch": ("1.0", "2.0")})
    shown.on_run_failure(step, "training.lr: 9; too much")
    assert isinstance(out.file, io.StringIO)
    lines = out.file.getvalue()
    assert "50.0%     1:01" in lines
    assert lines.count("torch was 1.0 and is 2.0") == 1
    assert "note: training.lr: 9; too much" in lines
    assert shown.done == 2
