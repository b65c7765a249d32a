"""A node's loop over messages: what comes of those that it can't fetch any more."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import Any

import pytest

from fedspan.federation.protocol import Envelope

pytest.importorskip("flwr", reason="the extra fedspan[flower] is not installed")

from flwr.app import Message

from fedspan.transports.flower import supernode
from fedspan.transports.flower.adapter import (
    NodeConnection,
    ObjectPullError,
    RunNotRunningException,
    deflate_message,
)
from fedspan.transports.flower.messages import new_salt, to_records
from fedspan.transports.flower.signing import UnsignedSigner

pytestmark = pytest.mark.usefixtures("identity")


def gone() -> BaseException:
    return RunNotRunningException()


def lost() -> BaseException:
    return ObjectPullError("id", "timeout")


@pytest.mark.parametrize("where", ["pull", "confirm", "send", "receive"])
@pytest.mark.parametrize("error", [gone, lost])
def test_a_run_that_ended_does_not_end_the_node(where: str, error: Callable[[], BaseException]) -> None:
    signer = UnsignedSigner()
    stop, answered, sent = Event(), list[Envelope](), list[Any]()
    failing = {where}

    def at(place: str) -> None:
        if place in failing:
            failing.clear()
            raise error()

    messages: list[tuple[Message, Any]] = []
    contents: dict[str, bytes] = {}
    for header in ("first", "second"):
        message = Message(to_records(signer.seal(Envelope(header), 1), new_salt()), dst_node_id=1, message_type="train")
        tree, objects = deflate_message(message)
        messages.append((message, tree))
        contents |= objects

    def receive() -> tuple[Message, Any] | None:
        at("receive")
        return messages.pop(0) if messages else None

    def pull(run: int, id: str) -> bytes:
        at("pull")
        return contents[id]

    def send(reply: Message, tree: Any, seconds: float) -> tuple[set[str], str]:
        at("send")
        sent.append(reply)
        return set(), "session"

    def answering(envelope: Envelope) -> Envelope:
        answered.append(envelope)
        if envelope.header == "second":
            stop.set()
        return envelope

    connection = NodeConnection(1, receive, send, None, None, pull, lambda *_: None, lambda *_: at("confirm"))
    supernode._answer(connection, supernode.Link("", None, None, 2**20), signer, answering, stop)
    taken = [envelope.header for envelope in answered]
    assert taken == (["second"] if where in ("pull", "confirm") else ["first", "second"])
    assert len(sent) == (2 if where == "receive" else 1)
