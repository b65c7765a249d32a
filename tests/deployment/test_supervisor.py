"""A data owner's node in a process of its own: one that hangs, or dies, costs its order and no more."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedspan.clients.refusals import refuse_any
from fedspan.config.node import load_node
from fedspan.deployment import supervisor
from fedspan.deployment.last_order import LastOrderFile, load_last_order
from fedspan.deployment.node_folder import LAST_ORDER, TRAINING, get_run_folder
from fedspan.deployment.supervisor import Supervisor
from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope, Order, decode_reply
from fedspan.federation.secagg.messages import decode_request
from helpers import pretend_service
from helpers.families import others_slow


def make_order(serial: int) -> Envelope:
    return Order("train", 0, 0, 0.1, "a", None, b"", run="none", serial=serial).to_envelope()


def answer(supervisor: Supervisor, serial: int) -> str:
    return decode_reply(supervisor.answer(make_order(serial))).failed or ""


def require_answered(supervised: Supervisor, serial: int) -> None:
    """Require that an order counts as answered, so that a node refuses it if the server sends it again."""
    last = load_last_order(get_run_folder(Path(load_node(supervised.path).folder), "none") / LAST_ORDER)
    assert (last.serial, last.is_closed) == (serial, True)
    if supervisor._serve is not pretend_service.serve:
        assert f"order {serial} arrived before" in answer(supervised, serial)


@pytest.fixture(scope="module", params=others_slow(["pretend", "node"], ["pretend"]))
def supervised(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    """The tests share a supervisor and, in this order, a process: one of a node takes many seconds to start."""
    folder = tmp_path_factory.mktemp("node")
    node = {"id": "a", "server": "h:1", "data": {"train": "own.csv"}, "folder": str(folder / "state")}
    (folder / "node.yaml").write_text(yaml.safe_dump(node))
    get_run_folder(folder / "state", "none").mkdir(parents=True)
    refusal = refuse_any(decode_request(make_order(0)), FedspanError("run", "none", "a run to which it was invited"))
    (folder / "reply.json").write_text(refusal.header)
    made = Supervisor(folder / "node.yaml", 120)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "pretend":
            patch.setattr(supervisor, "_serve", pretend_service.serve)
        yield made
    made.close()


def test_a_process_that_dies_is_reported_and_replaced(supervised: Supervisor) -> None:
    def kill() -> None:
        process = supervised._process
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)

    busy = supervised.path.with_name("busy")
    busy.touch()
    timer = threading.Timer(0.5, kill)
    timer.start()
    assert "the node's process ended" in answer(supervised, 1)
    timer.join()
    busy.unlink()
    require_answered(supervised, 1)
    assert "invited" in answer(supervised, 2)
    process = supervised._process
    assert process is not None
    assert "invited" in answer(supervised, 3)
    assert supervised._process is process


def test_an_order_that_takes_too_long_is_given_up_and_its_process_killed(
    supervised: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "invited" in answer(supervised, 4)
    process = supervised._process
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    monkeypatch.setattr(supervised, "seconds", 0.2)
    folder = get_run_folder(Path(load_node(supervised.path).folder), "none")
    progress = folder / TRAINING
    progress.mkdir()
    LastOrderFile(folder / LAST_ORDER).begin(make_order(5), 5)  # as the process does
    assert "limits.round_seconds" in answer(supervised, 5)
    assert supervised._process is None
    assert not process.is_alive()
    assert not progress.exists()  # another order may not take the same time again
    monkeypatch.undo()
    require_answered(supervised, 5)
    assert "invited" in answer(supervised, 6)


def test_a_process_that_dies_before_it_reads_its_order_is_reported(
    supervised: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect() -> Any:
        own, other = multiprocessing.Pipe()
        other.close()
        return own

    with monkeypatch.context() as patch:
        patch.setattr(supervised, "_connect", connect)
        assert "the node's process ended" in answer(supervised, 90)
    require_answered(supervised, 90)
