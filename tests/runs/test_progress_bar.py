"""The bars of a run: what they show in each stage, and when a call in Python has them."""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import fedspan
from fedspan.cli.formatting import create_console
from fedspan.runs import progress_bar
from fedspan.runs.callbacks import Listener
from fedspan.runs.progress_bar import ProgressBar, has_bar
from fedspan.runs.setup import Prepared
from fedspan.training.stages import Stage
from helpers import tiny
from helpers.clock import Clock


def shown(bar: ProgressBar, width: int = 80) -> str:
    out = Console(file=io.StringIO(), width=width)
    out.print(bar.render_footer())
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def bar(clock: Clock) -> ProgressBar:
    return ProgressBar(Console(file=io.StringIO(), width=80, force_terminal=True), clock)


@pytest.mark.parametrize("width", [80, 120])
def test_every_stage_has_its_bar(prepared: Prepared, clock: Clock, bar: ProgressBar, width: int) -> None:
    assert "reading the data and loading the model, elapsed 0:00" in shown(bar, width)
    bar.on_stage_change(Stage("model"))
    assert "loading the model, elapsed 0:00" in shown(bar, width)
    bar.on_stage_change(None)
    clock.now = 10.0
    bar.on_start(prepared, 0, False)
    said = shown(bar, width)
    assert "1/3" in said
    assert "0/3" in said
    assert "left" not in said, "no speed yet"
    training = Stage("training", 0, 24)
    bar.on_stage_change(Stage("hidden states", 30, 100, outer=training))
    said = shown(bar, width)
    assert "examples    30/100" in said
    assert "outputs of the frozen layers (once)" in said
    bar.on_stage_change(Stage("stacking", outer=training))
    assert "trying how many clients to train at once" in shown(bar, width)
    bar.on_stage_change(training)
    clock.now = 20.0
    first, *others = prepared.federation.draw_cohort(0)
    bar.on_stage_change(Stage("training", 8, 24))
    bar.on_client_finish(1, first, 2.0)
    bar.on_client_finish(1, first, 1.0)  # a second phase of the same client
    said = shown(bar, width)
    assert "clients        1/3" in said
    assert "loss 1.0000" in said
    assert first in said
    assert "elapsed 0:20, about" in said
    for client in others:
        bar.on_client_finish(1, client, 1.0)
    bar.on_stage_change(Stage("training", 24, 24))
    assert "finishing the round, " in shown(bar, width)
    bar.on_stage_change(Stage("evaluation", 3, 12))
    said = shown(bar, width)
    assert "measuring, " in said
    assert "examples      3/12" in said
    for round in (1, 2, 3):
        bar.on_round_finish({"round": round})
    bar.on_stage_change(None)
    assert "measuring the best round" in shown(bar, width)


def test_baselines_and_the_end(prepared: Prepared, clock: Clock, bar: ProgressBar) -> None:
    config = prepared.config.model_copy(update={"baselines": ["centralized"]})
    bar.on_start(fields(prepared, config), 3, True)
    bar.on_baseline_start("centralized", 3)
    bar.on_baseline_round("centralized", 1, 0.75)
    bar.on_stage_change(Stage("training", 40, 96))
    said = shown(bar)
    assert "centralized       1/3" in said
    assert "loss 0.7500" in said
    assert "examples        40/96" in said
    assert "⠋ training, elapsed" in said
    assert max(map(len, said.splitlines())) <= 80
    clock.now = 75.0
    with bar:
        pass
    assert shown(bar) == "3 rounds in 1:15\n"


def fields(prepared: Prepared, config: Any) -> Prepared:
    from dataclasses import replace

    return replace(prepared, config=config)


def test_fifty_clients_are_as_calm_as_four(prepared: Prepared, bar: ProgressBar) -> None:
    bar.on_start(prepared, 0, False)
    lines = len(shown(bar).splitlines())
    for index in range(50):
        bar.on_client_finish(1, f"client-{index:02}", 1.0)
        assert len(shown(bar).splitlines()) == lines == 4


@pytest.mark.parametrize("notebook", [False, True], ids=["file", "notebook"])
def test_without_bars_there_are_lines(
    prepared: Prepared, clock: Clock, notebook: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook without ipywidgets gets them, and no warning for each frame that Rich cannot draw."""
    monkeypatch.setattr(progress_bar, "find_spec", lambda name: None)
    printed = list[str]()
    console = Console(file=io.StringIO(), width=80, force_jupyter=notebook)
    monkeypatch.setattr(console, "print", lambda text, **_: printed.append(text.plain))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ProgressBar(console, clock) as bar:
            bar.on_stage_change(Stage("model"))
            clock.now = 4.0
            bar.on_start(prepared, 0, False)
            bar.on_stage_change(Stage("training", 8, 24))
            clock.now = 12.0
            bar.on_stage_change(Stage("training", 16, 24))
            bar.on_stage_change(Stage("training", 17, 24))
            for round in (1, 2, 3):
                bar.on_round_finish({"round": round})
    first, state, last = printed
    assert first == "reading the data and loading the model"
    assert state.startswith("  training, 16 of 24 examples, elapsed 0:12")
    assert last == "3 rounds in 0:12"


def test_the_state_is_described_only_for_a_line(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    described: list[float] = []
    bar = ProgressBar(Console(file=io.StringIO()), clock)
    monkeypatch.setattr(bar, "describe_state", lambda: described.append(clock.now) or "training")
    bar.on_stage_change(Stage("model"))  # announced with a line of its own
    for now in (1.0, 2.0, 12.0, 13.0):
        clock.now = now
        bar.on_stage_change(Stage("training", int(now), 20))
    assert described == [12.0]


def test_ipywidgets_draw_the_bars_of_a_notebook(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bar, "find_spec", lambda name: name)
    assert ProgressBar(Console(file=io.StringIO(), force_jupyter=True), clock).is_live


def test_forced_colors_are_not_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of notebooks and CI set FORCE_COLOR, and would print every frame of a bar."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    for stream, live in ((_Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setattr("sys.stdout", stream)
        assert ProgressBar().is_live is live
        assert create_console().is_terminal
        assert create_console().is_interactive is live


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_shown_in_a_terminal_or_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert has_bar(True)
    assert not has_bar(False)
    for stream, wanted in ((_Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr("sys.stderr", stream)
        assert has_bar(None) is wanted


def test_a_call_shows_the_bar_on_standard_error(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside the user's own listener, whatever the run's end."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    terminal, rounds = _Terminal(), list[int]()
    monkeypatch.setattr("sys.stderr", terminal)

    class Own(Listener):
        def on_round_finish(self, row: Any) -> None:
            rounds.append(row["round"])
            print(json.dumps(row["round"]))

    values = tiny.settings(tiny_folder, federation={"rounds": 2})
    fedspan.run(values, tmp_path / "run", listener=Own())
    assert rounds == [1, 2]
    assert "2 rounds in 0:" in terminal.getvalue()
    assert capsys.readouterr().out == "1\n2\n", "a file or pipe gets what the script prints, and no bar"
    terminal.truncate(0)
    fedspan.run(values, tmp_path / "quiet", progress=False)
    assert terminal.getvalue() == ""
    assert progress_bar.has_bar(None)
