"""A data owner's node in a process of its own: one that hangs, or dies, costs its order and no more."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from fedspan.config.node import load_node
from fedspan.deployment.node_folder import TRAINING, get_run_folder
from fedspan.deployment.supervisor import Supervisor
from fedspan.federation.protocol import Order, decode_reply

ORDER = Order("train", 0, 0, 0.1, "a", None, b"", run="none", serial=1).to_envelope()


@pytest.fixture(scope="module")
def supervised(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    """The tests share a supervisor and, in this order, a process: each takes seconds to start."""
    folder = tmp_path_factory.mktemp("node")
    node = {"id": "a", "server": "h:1", "data": {"train": "own.csv"}, "folder": str(folder / "state")}
    (folder / "node.yaml").write_text(yaml.safe_dump(node))
    supervisor = Supervisor(folder / "node.yaml", 120)
    yield supervisor
    supervisor.close()


def test_a_process_that_dies_is_reported_and_replaced(supervised: Supervisor) -> None:
    def kill() -> None:
        process = supervised._process
        assert process is not None
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)

    timer = threading.Timer(0.5, kill)
    timer.start()
    assert "the node's process ended" in (decode_reply(supervised.answer(ORDER)).failed or "")
    timer.join()
    assert "invited" in (decode_reply(supervised.answer(ORDER)).failed or "")
    process = supervised._process
    assert process is not None
    assert "invited" in (decode_reply(supervised.answer(ORDER)).failed or "")
    assert supervised._process is process


def test_an_order_that_takes_too_long_is_given_up_and_its_process_killed(
    supervised: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "invited" in (decode_reply(supervised.answer(ORDER)).failed or "")
    process = supervised._process
    assert process is not None
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    monkeypatch.setattr(supervised, "seconds", 0.2)
    progress = get_run_folder(Path(load_node(supervised.path).folder), "none") / TRAINING
    progress.mkdir(parents=True)
    assert "limits.round_seconds" in (decode_reply(supervised.answer(ORDER)).failed or "")
    assert supervised._process is None
    assert not process.is_alive()
    assert not progress.exists()  # its repetition may not take the same time again
    progress.parent.rmdir()  # the node was not invited to this run
