"""``fedspan compare`` and ``fedspan sweep``: what they show, how they stop and go on, and what they refuse."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result

from fedspan.config import load_config
from fedspan.experiments import execution
from helpers.command_line import done

Call = Callable[..., Result]
Write = Callable[..., Path]
Refused = Callable[..., str]


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
