"""How a run stands, read from its folder while others work on it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from fedspan.deployment.status import load_named_run, read_status, store_named_run
from fedspan.errors import FedspanError
from fedspan.logs import JsonLines
from fedspan.runs.folder import RunFolder, read_process_start


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("federation: {rounds: 7}\n")
    return folder


def rows(run: Path, *made: dict[str, object]) -> None:
    with JsonLines(run / "metrics.jsonl") as lines:
        for row in made:
            lines.append(row)
        lines.commit()


def test_a_run_that_has_started(run: Path) -> None:
    found = read_status(run)
    assert (found.state, found.round, found.rounds, found.finished) == ("stopped", 0, 7, None)


def test_a_run_at_work_and_what_failed_in_it(run: Path) -> None:
    failure = {"client": "a", "attempt": 0, "reason": "no reply within 5 s"}
    rows(run, {"round": 1, "failures": [failure]}, {"round": 2, "failures": [failure, {"client": "b"}], "late": ["c"]})
    (run / "run.lock").write_text(f"{os.getpid()}\n{socket.gethostname()}\n")
    (run / "checkpoints" / "round-00002").mkdir(parents=True)
    os.utime(run / "checkpoints" / "round-00002", (1000, 1000))
    found = read_status(run)
    assert (found.state, found.round, found.finished) == ("at work", 2, 1000)
    assert found.failures == {"a": {"count": 2, "round": 2, "reason": "no reply within 5 s"}}
    assert found.late == {"c": 1}


def test_a_run_whose_process_is_gone(run: Path) -> None:
    (run / "run.lock").write_text(f"999999999\n{socket.gethostname()}\n")
    assert read_status(run).state == "stopped"
    (run / "run.lock").write_text(f"{os.getpid()}\n{socket.gethostname()}\n1\n")  # its id belongs to another one now
    assert read_status(run).state == ("at work" if read_process_start(os.getpid()) is None else "stopped")
    with RunFolder.resume(run):
        assert read_status(run).state == "at work"
    (run / "run.lock").write_text("1\nanother-machine\n")
    assert read_status(run).state == "at work"
    (run / "report.json").write_text("{}")
    assert read_status(run).state == "finished"


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(FedspanError, match="holds no run"):
        read_status(tmp_path)


def test_a_server_knows_its_newest_run(tmp_path: Path) -> None:
    assert load_named_run(tmp_path) is None
    store_named_run(tmp_path, tmp_path / "first", {"a": 1})
    store_named_run(tmp_path, tmp_path / "second", {"a": 2**63})
    found = load_named_run(tmp_path)
    assert (found.folder, found.nodes) == (tmp_path / "second", {"a": str(2**63)})
    for content in ("", "[]", '{"run": 3}', "[" * 10_000):
        (tmp_path / "run.json").write_text(content)
        assert load_named_run(tmp_path) is None
