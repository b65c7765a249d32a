"""What a run and a series show while they are at work."""

import io
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedspan.assembly.run import Prepared
from fedspan.cli.series import SeriesView
from fedspan.config import RunConfig
from fedspan.experiments.series import Step
from fedspan.experiments.series_bar import SeriesBar
from fedspan.progress.view import RunView
from fedspan.training.stages import Stage
from helpers.clock import Clock


def row(round: int, accuracy: float, **more: Any) -> dict[str, Any]:
    moved = {"down": 1_700_000 * round, "up": 1_600_000 * round}
    scores = {
        "validation": {"accuracy": accuracy},
        "test": {"accuracy": accuracy - 0.01},
        "clients": {"accuracy": 0.5, "worst": {"client": "a-hospital-with-a-long-name", "accuracy": 0.25}},
    }
    return {"round": round, "loss": 1.25, "seconds": 61.0 * round, "bytes": moved, **scores, **more}


def view(width: int, clock: Clock, *, terminal: bool) -> tuple[RunView, Console]:
    out = Console(file=io.StringIO(), width=width, force_terminal=terminal, highlight=False, legacy_windows=False)
    return RunView(out, Path("runs/first"), clock), out


def printed(out: Console) -> list[str]:
    return out.file.getvalue().splitlines()


def test_lines_without_a_terminal(prepared: Prepared) -> None:
    clock = Clock()
    shown, out = view(80, clock, terminal=False)
    with shown:
        shown.on_start(prepared, 0, False)
        for client in ("east", "north", "south"):
            shown.on_client_finish(1, client, 1.0)
        shown.on_round_finish(row(1, 0.5))
        shown.on_round_finish(row(2, 0.625, loss=None, test=None, clients=None))
        shown.on_round_finish({**row(3, 0.0), "validation": None})
        shown.on_baseline_start("local-only", 3)
        for round in (1, 2, 3):
            shown.on_baseline_round("local-only", round, 0.5)
    head, folder, columns, *lines = printed(out)
    assert head.startswith("fedit on ")
    assert "4 clients, 3 a round" in head
    assert folder == "run folder runs/first"
    assert columns.split()[:3] == ["round", "loss", "validation"]
    assert lines[0].split() == [
        "1/3",
        "1.2500",
        "50.0%",
        "49.0%",
        "a-hospital-wi…",
        "25.0%",
        *["1.7", "MB", "1.6", "MB", "1:01"],
    ]
    assert lines[1].split() == ["2/3", "-", "62.5%", "-", "-", "3.4", "MB", "3.2", "MB", "2:02"]
    assert lines[2].split()[2] == "-"
    assert lines[3:] == ["baseline local-only: 3 epochs, loss 0.5000"]
    assert {len(line) for line in lines[:3]} == {80}


def test_the_best_round_so_far_is_bold(prepared: Prepared) -> None:
    """Without scores that select rounds, as of two nodes, a row names no best round."""
    shown, out = view(80, Clock(), terminal=True)
    with shown:
        shown.on_start(prepared, 0, False)
        shown.on_round_finish(row(1, 0.5, best_round=1))
        shown.on_round_finish(row(2, 0.25, best_round=1))
        shown.on_round_finish(row(3, 0.75))
    rows = [line for line in printed(out) if any(f"{number}/3 " in line for number in (1, 2, 3)) and "MB" in line]
    assert [line.count("\x1b[1m") > 0 for line in rows] == [True, False, False]


def test_without_a_terminal_long_work_is_reported_now_and_then(prepared: Prepared) -> None:
    clock = Clock()
    shown, out = view(80, clock, terminal=False)
    with shown:
        shown.on_stage_change(Stage("data"))
        shown.on_stage_change(Stage("model"))
        assert printed(out) == ["reading the data and loading the model"]
        shown.on_start(prepared, 0, False)
        began = len(printed(out))
        for second in range(1, 401):
            clock.now = second
            shown.on_stage_change(Stage("training", second, 1000))
    lines = printed(out)[began:]
    assert lines[0].startswith("  training, 10 of 1000 examples, elapsed 0:10, about ")
    times = [int(line.partition(" of ")[0].split()[-1]) for line in lines]
    apart = [after - before for before, after in pairwise(times)]
    assert min(apart) == 10
    assert apart[-1] == 20


def test_the_first_row_says_what_came_before_it_once(prepared: Prepared) -> None:
    clock = Clock()
    shown, out = view(80, clock, terminal=False)
    with shown:
        shown.on_start(prepared, 0, False)
        for round in (1, 2):
            training = Stage("training", 0, 100)
            steps = {0: training, 1: Stage("hidden states", 0, 50, outer=training), 6: training}
            steps |= {6.1: Stage("stacking", outer=training), 6.5: training, 9: None}
            for second, stage in steps.items():
                clock.now = 10 * round + second
                shown.on_stage_change(stage)
            shown.on_round_finish(row(round, 0.5))
    assert [line for line in printed(out) if "before the first round" in line] == [
        "before the first round: outputs of the frozen layers 0:05"
    ]


def test_going_on_shows_the_rounds_before(prepared: Prepared, stopped: Path) -> None:
    out = Console(file=io.StringIO(), width=80)
    shown = RunView(out, stopped)
    shown.on_start(prepared, 2, True)
    lines = printed(out)
    assert lines[-1] == "resumed after round 2 of 3"
    assert lines[-2].split()[0] == "2/3"


@pytest.fixture
def series(prepared: Prepared) -> tuple[SeriesView, Console, Step]:
    out = Console(file=io.StringIO(), width=80, force_terminal=True, highlight=False, legacy_windows=False)
    shown = SeriesView(out, Path("runs/three"), lambda: 0.0)
    config: RunConfig = prepared.config
    step = Step("fedit-seed0", "fedit, seed 0", "fedit", 0, config)
    shown.on_series_start([step, step])
    return shown, out, step


def footer(shown: SeriesView | SeriesBar) -> str:
    out = Console(file=io.StringIO(), width=80)
    out.print(shown.render_footer())
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
    shown.on_baseline_start("local-only", 3)
    shown.on_baseline_round("local-only", 2, 0.5)
    assert "local-only       2/3" in footer(shown)
    shown.on_run_finish(step, "accuracy", 0.5, 61.0, True)
    assert "run 2 of 2" in footer(shown)
    for _ in range(2):
        shown.on_environment_change({"torch": ("1.0", "2.0")})
    shown.on_run_failure(step, "training.lr: 9; too much")
    lines = out.file.getvalue()
    assert "50.0%     1:01" in lines
    assert lines.count("torch was 1.0 and is 2.0") == 1
    assert "note: training.lr: 9; too much" in lines
    assert shown.done == 2


def test_the_current_run_has_its_place_in_the_series_and_its_bars(prepared: Prepared) -> None:
    bar = SeriesBar(Console(file=io.StringIO(), width=80, force_terminal=True), lambda: 0.0)
    step = Step("fedit-seed0", "fedit, seed 0", "fedit", 0, prepared.config)
    bar.on_series_start([step, step])
    bar.on_run_start(step)
    bar.on_stage_change(Stage("model"))
    assert "run 1 of 2: fedit, seed 0; all: 0:00" in footer(bar)
    assert "loading the model" in footer(bar)
    bar.on_start(prepared, 0, False)
    bar.on_stage_change(Stage("training", 6, 24))
    bar.on_client_finish(1, "north", 1.5)
    assert "clients        1/3" in footer(bar)
    bar.on_run_finish(step, "accuracy", 0.5, 61.0, True)
    bar.on_run_start(step)
    assert "run 2 of 2" in footer(bar)
    assert "clients" not in footer(bar), "of the next run, nothing is known yet"
    bar.on_run_failure(step, "it diverged")
    with bar:
        pass
    assert footer(bar) == "2 runs in 0:00\n"
    bar.done = 1
    assert footer(bar) == "1 run in 0:00\n"
