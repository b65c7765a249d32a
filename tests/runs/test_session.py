"""A run that is killed, or whose disk fills, at any moment: it goes on from the last finished round to the same end."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedspan.errors import FedspanError
from fedspan.logs import encode_chain_line, find_position, read_lines
from fedspan.run_folder import RunFolder
from fedspan.runs.checkpoint import load_latest, resume, truncate_logs
from fedspan.runs.checkpoint_format import load
from fedspan.runs.ledger import read_totals
from helpers.interrupted_run import begin, go_on, memory_of, state_of

CHANGES = ["write", "fsync", "mkdir", "rename", "replace", "link", "unlink", "rmdir", "ftruncate", "open"]
"""The functions of ``os`` through which the file system is changed."""


def tree(path: Path) -> dict[str, bytes]:
    """Every file of a run with its content, the lock aside."""
    files = (file for file in path.rglob("*") if file.is_file() and file.name != "run.lock")
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def uninterrupted(path: Path, stop: int) -> dict[str, bytes]:
    with begin(path) as run:
        go_on(run, stop)
    return tree(path)


def assert_sound(path: Path) -> int:
    """Every checkpoint and what its clients keep is whole, the logs reach to the latest at least; returns its round."""
    run = RunFolder(path)
    for folder in run.checkpoints.glob("round-?????"):
        whole = load(folder)
        states = dict(whole.states)
        assert states.pop("b").moments["train"][0].steps == {"l/A": whole.state.round}
        for client, own in states.items():
            behind = 0 if client == "a" else (whole.state.round - int(client[1:])) % 5
            assert torch.equal(own.memory["l/B"], memory_of(whole.state.round - behind)["l/B"])
        assert len(states) == 1 + min(5, whole.state.round)
    checkpoint = load_latest(run)
    if checkpoint is None:
        return 0
    round = checkpoint.state.round
    assert torch.equal(checkpoint.state.tensors["l/A"], state_of(round).tensors["l/A"])
    assert checkpoint.last_rounds == {"a": round, "b": None}
    assert run.metrics.stat().st_size >= checkpoint.positions["metrics.jsonl"].length
    assert run.ledger.stat().st_size >= checkpoint.positions["ledger.jsonl"].length
    if run.best.exists():
        assert load(run.best).selection.best is not None
    return round


class Killed(BaseException):
    """Stands for the end of the process."""


class Interruption:
    """Lets a number of file system changes happen, then fails: once with an ``OSError``, or for ever as if killed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failure: BaseException) -> None:
        self.left = 10**9
        self.struck = False
        self._failure = failure
        for name in CHANGES:
            monkeypatch.setattr(os, name, self._counting(name, getattr(os, name)))

    def _counting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR):
                return function(*args, **kwargs)
            self.left -= 1
            if self.left < 0 and (isinstance(self._failure, Killed) or not self.struck):
                if name == "write" and not self.struck:
                    function(args[0], args[1][: len(args[1]) // 2])
                self.struck = True
                raise self._failure
            return function(*args, **kwargs)

        return counted


@pytest.mark.parametrize(("finished", "least"), [(6, 25), pytest.param(5, 50, marks=pytest.mark.slow)])
def test_killed_at_every_change_of_the_file_system(
    finished: int, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = uninterrupted(tmp_path / "reference", 7)
    uninterrupted(tmp_path / "begun", finished)
    changes = 0
    while True:
        path = shutil.copytree(tmp_path / "begun", tmp_path / str(changes))
        with monkeypatch.context() as patch:
            interruption = Interruption(patch, Killed())
            run = begin(path)
            interruption.left = changes
            try:
                go_on(run, 7)
            except Killed:
                pass
            finally:
                interruption.left = 10**9
                run.close()
        assert assert_sound(path) >= finished
        with begin(path) as run:
            go_on(run, 7)
        assert tree(path) == end, f"killed after {changes} changes"
        if not interruption.struck:  # it got through before the strike
            break
        changes += 1
    assert changes > least


@pytest.mark.parametrize("code", [errno.ENOSPC, pytest.param(errno.EIO, marks=pytest.mark.slow)])
def test_disk_refuses_at_every_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    end = uninterrupted(tmp_path / "reference", 3)
    uninterrupted(tmp_path / "begun", 2)
    changes = 0
    while True:
        path = shutil.copytree(tmp_path / "begun", tmp_path / str(changes))
        with begin(path) as run:
            said = ""
            with monkeypatch.context() as patch:
                interruption = Interruption(patch, OSError(code, os.strerror(code)))
                interruption.left = changes
                try:
                    go_on(run, 3)
                except FedspanError as error:
                    said = str(error)
            if said:
                assert said.startswith(f"`run folder`: '{path}' cannot be used: ")
                assert "The last finished round is intact" in said
                assert ("the disk is full" in said) == (code == errno.ENOSPC)
            assert assert_sound(path) >= 2
            go_on(run, 3)
        assert tree(path) == end, f"refused after {changes} changes"
        if not interruption.struck:  # it got through before the strike
            break
        changes += 1
    assert changes > 15


def test_a_round_that_was_not_committed_leaves_no_trace(tmp_path: Path) -> None:
    end = uninterrupted(tmp_path / "run", 3)
    run = RunFolder(tmp_path / "run")
    with run.metrics.open("ab") as metrics, run.ledger.open("ab") as ledger:
        _, line = encode_chain_line(find_position(run.metrics).head, {"round": 4})
        metrics.write(line + b'{"rou')
        ledger.write(b'{"round": 4, "client": "a", "dir')
    assert [row["round"] for row in read_lines(run.metrics)] == [1, 2, 3, 4]
    assert read_totals(run.ledger).rounds == (1, 2, 3)
    with begin(run.path) as run:
        go_on(run, 3)
    assert tree(run.path) == end


def test_stopped_before_the_first_checkpoint(tmp_path: Path) -> None:
    with begin(tmp_path / "run") as run:
        run.metrics.write_text('{"round": 1}\n')
        assert resume(run) is None
        assert run.metrics.read_bytes() == b""


@pytest.mark.parametrize("change", ["shortened", "edited"])
def test_logs_that_do_not_fit_the_checkpoint_are_named(tmp_path: Path, change: str) -> None:
    uninterrupted(tmp_path / "run", 3)
    run = RunFolder(tmp_path / "run")
    data = run.ledger.read_bytes()
    run.ledger.write_bytes(data[:-1] if change == "shortened" else b"x" + data)
    with pytest.raises(FedspanError, match=r"ledger\.jsonl"):
        truncate_logs(run, load_latest(run))
