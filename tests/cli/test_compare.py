"""``fedspan compare`` and ``sweep``: how they stop and go on; and what a run and a series show at work."""

import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from fedspan.assembly.run import Prepared
from fedspan.cli.series import SeriesView
from fedspan.config import RunConfig, load_config
from fedspan.experiments import execution
from fedspan.experiments.series import Step
from fedspan.experiments.series_bar import SeriesBar
from fedspan.progress.view import RunView
from fedspan.training.stages import Stage
from helpers.clock import Clock
from helpers.command_line import Call, Refused, Write, done


@pytest.fixture(scope="module")
def config(write: Write) -> Path:
    return write(federation={"rounds": 1}, partition={"validation": 0.3})


@pytest.fixture(scope="module")
def compared(call: Call, config: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("comparison") / "made"
    arguments = ["--methods", "fedit,fedloru", "--seeds", "0,1", "--set-for", "fedloru:method.tau=1"]
    return folder, done(call("compare", config, *arguments, "--out", folder))


@pytest.fixture(scope="module")
def swept(call: Call, config: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("sweep") / "made"
    return folder, done(call("sweep", config, "--over", "training.lr=1e-3..1e-1", "--trials", 2, "--out", folder))


def narrow(screen: str) -> bool:
    """Whether all lines but those with folders fit on a screen of 80 columns."""
    return max(len(line) for line in screen.splitlines() if "/" not in line.replace("±", "")) <= 80


def test_compare_shows_a_line_a_run_and_the_table(compared: tuple[Path, str], call: Call) -> None:
    folder, screen = compared
    for number, label in enumerate(("fedit, seed 0", "fedit, seed 1", "fedloru, seed 0", "fedloru, seed 1"), 1):
        assert f"{number}/4 {label} " in screen
    rows = json.loads(done(call("compare", "--resume", folder, "--json")))["rows"]
    for row in rows:
        assert f"{100 * row['mean']:.1f} ± {100 * row['deviation']:.1f}" in screen
    difference = rows[1]["difference"]
    assert f"{100 * difference['mean']:+.1f}" in screen
    assert ("no interval" in " ".join(screen.split())) == (difference["low"] is None)
    assert "no measurable difference" in " ".join(screen.split())
    assert "higher is better" in screen
    assert narrow(screen)
    settings = yaml.safe_load((folder / "compare.yaml").read_text())
    assert settings["for"] == {"fedloru": ["method.tau=1"]}


def test_what_is_finished_is_read(compared: tuple[Path, str], call: Call) -> None:
    folder, screen = compared
    before = (folder / "fedit-seed0" / "report.json").stat().st_mtime_ns
    again = done(call("compare", "--resume", folder))
    assert again.splitlines()[1:] == screen.splitlines()[1:]
    assert (folder / "fedit-seed0" / "report.json").stat().st_mtime_ns == before


def test_sweep_says_how_to_run_the_best(swept: tuple[Path, str], call: Call) -> None:
    folder, screen = swept
    assert screen.splitlines()[-1] == f"run the best settings: fedspan run {folder / 'best.yaml'}"
    report = json.loads(done(call("sweep", "--resume", folder, "--json")))
    assert "test" not in json.dumps({**report, "folder": "", "best": ""})
    rates = [trial["values"]["training.lr"] for trial in report["trials"]]
    assert len(set(rates)) == 2
    assert all(1e-3 <= rate <= 1e-1 for rate in rates)
    assert load_config(folder / "best.yaml").training.lr == rates[0]
    assert screen.index(f" {rates[0]} ") < screen.rindex(f" {rates[1]} ")
    assert narrow(screen)


def test_a_sweep_without_a_winner_shows_why(call: Call, config: Path, tmp_path: Path) -> None:
    changes = ("training.optimizer=sgd", "training.max_grad_norm=0", "federation.rounds=2")
    settings = [part for change in changes for part in ("--set", change)]
    result = call("sweep", config, "--over", "training.lr=1e30", *settings, "--out", tmp_path / "made")
    assert result.exit_code == 2
    assert "failed" in result.stdout
    assert result.stderr == (
        "error: `training.lr`: every trial diverged. Try lower learning rates.\n"
        f"see {Path(__file__).parents[2] / 'docs' / 'config.md'}#training\n"
    )
    assert not (tmp_path / "made" / "best.yaml").exists()


@pytest.mark.parametrize("command", ["compare", pytest.param("sweep", marks=pytest.mark.slow)])
def test_ctrl_c_says_how_to_continue(
    command: str, call: Call, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, finished = execution.train.run, []

    def interrupted(config: Any, place: Path, **more: Any) -> Any:
        if finished:
            raise KeyboardInterrupt
        finished.append(place)
        return train(config, place, **more)

    folder = tmp_path / "my runs"
    asked = {"compare": ["--methods", "fedit", "--seeds", "0,1"], "sweep": ["--over", "method.r=1,2"]}[command]
    with monkeypatch.context() as patch:
        patch.setattr(execution.train, "run", interrupted)
        result = call(command, config, *asked, "--out", folder)
    assert result.exit_code == 130
    assert result.stderr.startswith("stopped; 1 of 2 runs are finished. Resume with:\n")
    assert result.stderr.endswith(f"  fedspan {command} --resume '{folder}'\n")
    before = (finished[0] / "report.json").stat().st_mtime_ns
    assert "2/2" in done(call(command, "--resume", folder))
    assert (finished[0] / "report.json").stat().st_mtime_ns == before


COMPARE, SWEEP = ["compare", "CONFIG", "--out", "OUT"], ["sweep", "CONFIG", "--out", "OUT"]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["compare"], "CONFIG"),
        (["compare", "CONFIG"], "--out"),
        (COMPARE, "--methods"),
        ([*COMPARE, "--methods", "fedit", "--seeds", "0,x"], "--seeds"),
        ([*COMPARE, "--methods", "fedit", "--set-for", "method.r=3"], "--set-for"),
        (["compare", "CONFIG", "--resume", "OUT"], "CONFIG"),
        (["compare", "--methods", "fedit", "--resume", "OUT"], "--methods"),
        (["compare", "--resume", "OUT"], "folder"),
        (SWEEP, "--over"),
        ([*SWEEP, "--over", "method.r"], "--over"),
        ([*SWEEP, "--over", "seed=1", "--over", "seed=2"], "--over"),
        ([*SWEEP, "--over", "training.lr=1e-3..1"], "--over"),
        (["sweep", "--trials", "3", "--resume", "OUT"], "--trials"),
    ],
)
def test_mistakes(arguments: list[str], field: str, refused: Refused, config: Path, tmp_path: Path) -> None:
    places = {"CONFIG": str(config), "OUT": str(tmp_path / "made")}
    assert refused(*(places.get(argument, argument) for argument in arguments)).startswith(f"`{field}`: ")
    assert not (tmp_path / "made").exists()


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
