"""A node whose key the server does not accept: it says so, and asks more and more rarely."""

import logging
import time
from collections.abc import Generator
from contextlib import contextmanager
from email.utils import formatdate
from threading import Event
from typing import Any

import httpx
import pytest

from fedspan.errors import FedspanError

supernode = pytest.importorskip(
    "fedspan.transports.http.supernode", reason="the extra fedspan[flower] is not installed"
)


class Clock(Event):
    """An event that is never set; waiting for it moves the time forward at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pauses = list[float]()

    def wait(self, timeout: float | None = None) -> bool:
        self.pauses.append(timeout or 0.0)
        self.now += timeout or 0.0
        return False


def refuse(status: int, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> FedspanError:
    """Let a node's connections be refused until it gives up."""

    @contextmanager
    def connect(*_: Any) -> Generator[Any]:
        response = httpx.Response(status, headers={"date": formatdate(time.time(), usegmt=True)})
        raise httpx.HTTPStatusError("refused", request=httpx.Request("POST", "https://h"), response=response)
        yield

    monkeypatch.setattr(supernode, "connect_node", connect)
    monkeypatch.setattr(supernode.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(supernode.random, "uniform", lambda low, high: 1.0)
    with pytest.raises(FedspanError) as caught:
        supernode.serve(supernode.Link("h:1", None, None, 2**20), lambda envelope: envelope, clock)
    return caught.value


def test_a_key_that_the_operator_revoked_is_named_and_asked_for_at_most_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    with caplog.at_level(logging.WARNING, "fedspan.node"):
        error = refuse(401, clock, monkeypatch)
    assert "has not admitted this node's key" in str(error)
    assert "has revoked it" in str(error)
    assert clock.pauses == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert all("has revoked it" in message for message in caplog.messages)
    assert len(caplog.messages) == len(clock.pauses)


def test_a_connection_that_has_not_timed_out_is_another_reason_and_is_tried_again_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    error = refuse(403, clock, monkeypatch)
    assert "has not timed out" in str(error)
    assert "revoked" not in str(error)
    assert set(clock.pauses) == {2.0}
