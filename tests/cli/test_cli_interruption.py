"""``fedspan run`` that is killed or stopped with Ctrl-C continues with ``--resume`` to the very same adapter."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from fedspan.progress.view import RunView
from fedspan.run_folder import RunFolder
from fedspan.runs import checkpoint as checkpoints

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks, and sends signals")

SCRIPT = Path(__file__).parents[1] / "helpers" / "forked_command.py"
ROUNDS = 8


class Commands:
    """``fedspan`` commands, each in a process of its own."""

    def __init__(self, output: Path) -> None:
        self.output = output
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            [sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._mark = 0

    def start(self, *arguments: object, waits: int | None = None) -> int:
        """Start a command; returns its process, which may be sent signals until ``end``."""
        self._mark = self.output.stat().st_size if self.output.exists() else 0
        given = [str(argument) for argument in arguments]
        return self._ask(json.dumps([str(self.output), waits, *given]), "started")

    def end(self) -> tuple[int, str]:
        """Wait for the end of the command; its exit code (minus the signal) and what it said."""
        code = self._ask("", "ended")
        return code, self.output.read_bytes()[self._mark :].decode()

    def _ask(self, line: str, answer: str) -> int:
        assert self._server.stdin is not None
        print(line, file=self._server.stdin, flush=True)
        word, number = self._server.stdout.readline().split()
        assert word == answer, "never send a signal to a number that is no process"
        return int(number)

    def close(self) -> None:
        with self._server:
            self._server.kill()  # leaving by itself takes torch a while


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    made = Commands(tmp_path_factory.mktemp("commands") / "output.txt")
    yield made
    made.close()


@pytest.fixture(scope="module")
def config(write: Callable[..., Path]) -> Path:
    return write(federation={"rounds": ROUNDS}, training={"optimizer_state": "keep"}, evaluation={"every": 2})


@pytest.fixture(scope="module")
def expected(commands: Commands, config: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("run") / "run"
    commands.start("run", config, "--out", folder)
    code, said = commands.end()
    assert code == 0, said
    return adapter(folder)


def adapter(folder: Path) -> bytes:
    return (folder / "adapter" / "adapter_model.safetensors").read_bytes()


def rounds_of(folder: Path) -> int:
    metrics = RunFolder(folder).metrics
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def wait_for(folder: Path, rounds: int, count: Callable[[Path], int] = rounds_of) -> None:
    """Wait until rounds are in the logs, or saved, which is later."""
    deadline = time.monotonic() + 300
    while count(folder) < rounds:
        assert time.monotonic() < deadline, f"{count(folder)} rounds in 300 s"
        time.sleep(0.005)


@pytest.mark.slow  # commands are forked from a process that imports everything
def test_killed_at_random_moments(commands: Commands, config: Path, expected: bytes, tmp_path: Path) -> None:
    """In the first round, while loading, or after so many rounds and a while that is drawn."""
    draws, folder = random.Random(0), tmp_path / "run"
    killed: list[int] = []
    for rounds in (0, 0, 1, 2, 4):
        begun = (folder / "config.yaml").exists()
        pid = commands.start("run", *(("--resume", folder) if begun else (config, "--out", folder)))
        wait_for(folder, rounds)
        time.sleep(draws.uniform(0, 0.3))
        os.kill(pid, signal.SIGKILL)
        code, said = commands.end()
        assert code in (-signal.SIGKILL, 0), said
        if code == 0:  # it got through before the kill
            break
        killed.append(rounds_of(folder))
    assert len(set(killed)) >= 3, killed
    commands.start("run", "--resume", folder)
    code, said = commands.end()
    assert code == 0, said
    assert adapter(folder) == expected


def test_ctrl_c_between_rounds_says_how_to_continue(
    config: Path, call: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, folder, finished = tmp_path / "whole", tmp_path / "my run", RunView.on_round_finish
    rounds = ("--set", "federation.rounds=4")
    assert call("run", config, *rounds, "--out", whole).exit_code == 0

    def interrupt(self: RunView, row: Mapping[str, Any]) -> None:
        finished(self, row)
        if row["round"] == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunView, "on_round_finish", interrupt)
        stopped = call("run", config, *rounds, "--out", folder)
    assert stopped.exit_code == 130, stopped.output
    done = int(stopped.stderr.partition("stopped; ")[2].partition(" of 4 rounds are saved")[0])
    assert done in (2, 3)
    assert stopped.stderr.endswith(f"Resume with:\n  fedspan run --resume '{folder}'\n")
    resumed = call("run", "--resume", folder)
    assert resumed.exit_code == 0, resumed.output
    assert f"resumed after round {done} of 4" in resumed.output
    assert adapter(folder) == adapter(whole)


@pytest.mark.slow
def test_ctrl_c_says_how_to_continue(commands: Commands, config: Path, expected: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "my run"
    pid = commands.start("run", config, "--out", folder, waits=2)
    wait_for(folder, 2, lambda folder: checkpoints.read_last_saved_round(RunFolder(folder)))
    os.kill(pid, signal.SIGINT)
    code, said = commands.end()
    assert code == 130, said
    assert "Traceback" not in said
    done = int(said.partition("stopped; ")[2].partition(f" of {ROUNDS} rounds are saved")[0])
    assert done == 2
    assert said.endswith(f"Resume with:\n  fedspan run --resume '{folder}'\n")
    commands.start("run", "--resume", folder)
    code, said = commands.end()
    assert code == 0, said
    assert f"resumed after round {done} of {ROUNDS}" in said
    assert adapter(folder) == expected


@pytest.mark.slow
def test_killed_from_its_start_as_a_command_of_its_own(config: Path, expected: bytes, tmp_path: Path) -> None:
    """Nothing shared, nothing forked: the interpreter itself is killed, at moments spread over a whole run."""
    folder = tmp_path / "run"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def start() -> subprocess.Popen[bytes]:
        begun = (folder / "config.yaml").exists()
        what = ["--resume", str(folder)] if begun else [str(config), "--out", str(folder)]
        return subprocess.Popen([sys.executable, "-m", "fedspan", "run", *what], env=environment)

    for round in (0, 2, 5):
        with start() as process:
            while rounds_of(folder) < round and process.poll() is None:
                time.sleep(0.02)
            time.sleep(0.1)
            process.kill()
    with start() as process:
        assert process.wait() == 0
    assert adapter(folder) == expected
