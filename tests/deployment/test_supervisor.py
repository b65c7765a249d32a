"""A data owner's node in a process of its own: one that hangs, or dies, costs its order and no more."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from fedspan.deployment.supervisor import Supervisor
from fedspan.federation.protocol import Order, decode_reply

ORDER = Order("train", 0, 0, 0.1, "a", None, b"", run="none", serial=1).envelope()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    node = {"id": "a", "server": "h:1", "data": {"train": "own.csv"}, "folder": str(tmp_path / "state")}
    (tmp_path / "node.yaml").write_text(yaml.safe_dump(node))
    return tmp_path / "node.yaml"


@pytest.fixture
def supervised(path: Path) -> Iterator[Supervisor]:
    made = Supervisor(path, 120)
    yield made
    made.close()


def test_an_order_that_takes_too_long_is_given_up_and_its_process_killed(path: Path) -> None:
    made = Supervisor(path, 5.0)
    assert "invited" in (decode_reply(made.answer(ORDER)).failed or "")
    process = made._process
    assert process is not None
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    assert "limits.round_seconds" in (decode_reply(made.answer(ORDER)).failed or "")
    assert made._process is None
    assert not process.is_alive()
    assert "invited" in (decode_reply(made.answer(ORDER)).failed or "")
    made.close()


def test_a_process_that_dies_is_told_of_and_replaced(supervised: Supervisor) -> None:
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
