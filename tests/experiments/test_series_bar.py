"""The bars of a series that is started from Python."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

import fedspan
from fedspan.experiments.series import Step
from fedspan.experiments.series_bar import SeriesBar
from fedspan.experiments.watcher import Watcher
from fedspan.runs.setup import Prepared
from fedspan.training.stages import Stage
from helpers import tiny


def shown(bar: SeriesBar) -> str:
    out = Console(file=io.StringIO(), width=80)
    out.print(bar.render_footer())
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def test_the_current_run_has_its_place_in_the_series_and_its_bars(prepared: Prepared) -> None:
    bar = SeriesBar(Console(file=io.StringIO(), width=80, force_terminal=True), lambda: 0.0)
    step = Step("fedit-seed0", "fedit, seed 0", "fedit", 0, prepared.config)
    bar.on_series_start([step, step])
    bar.on_run_start(step)
    bar.on_stage_change(Stage("model"))
    assert "run 1 of 2: fedit, seed 0; all: 0:00" in shown(bar)
    assert "loading the model" in shown(bar)
    bar.on_start(prepared, 0, False)
    bar.on_stage_change(Stage("training", 6, 24))
    bar.on_client_finish(1, "north", 1.5)
    assert "clients        1/3" in shown(bar)
    bar.on_run_finish(step, "accuracy", 0.5, 61.0, True)
    bar.on_run_start(step)
    assert "run 2 of 2" in shown(bar)
    assert "clients" not in shown(bar), "of the next run, nothing is known yet"
    bar.on_run_failure(step, "it diverged")
    with bar:
        pass
    assert shown(bar) == "2 runs in 0:00\n"
    bar.done = 1
    assert shown(bar) == "1 run in 0:00\n"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_comparison_shows_one_view_of_all_its_runs(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal, finished = _Terminal(), list[str]()
    monkeypatch.setattr("sys.stderr", terminal)

    class Own(Watcher):
        def on_run_finish(self, step: Step, metric: str, value: float | None, seconds: float, is_new: bool) -> None:
            finished.append(step.name)

    values = tiny.settings(tiny_folder, federation={"rounds": 1})
    fedspan.compare(values, tmp_path / "two", ["fedit", "rolora"], seeds=[0], listener=Own())
    assert finished == ["fedit-seed0", "rolora-seed0"]
    assert "2 runs in 0:" in terminal.getvalue()
    assert "rounds in" not in terminal.getvalue(), "the runs have no bars of their own"
    terminal.truncate(0)
    fedspan.compare(values, tmp_path / "two", ["fedit", "rolora"], seeds=[0], progress=False)
    assert terminal.getvalue() == ""
