"""The server side of a deployment: a transport over Flower's grid, and a run on a SuperLink served by this process.

In Flower, the SuperLink starts a ServerApp in a separate process, from a bundle that anyone who can reach it may
submit. Here the SuperLink starts nothing (``--isolation process`` without a SuperExec). A process that has the
SuperLink's secret takes over the run, and the process with the run folder and the terminal uses the grid.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, TypeVar

import httpx
from flwr.app import ConfigRecord, Message, RecordDict

from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope, OnReply, Orders, Transport
from fedspan.transports.flower.adapter import (
    ObjectPullError,
    RunNotRunningException,
    TaskGrid,
    acquire_task,
    pull_failure,
)
from fedspan.transports.flower.messages import TooLarge, assemble_message, fetch_objects, from_records, to_records
from fedspan.transports.flower.server import ServerLink, call_flower

__all__ = ["Grid", "GridTransport", "attach", "invite", "roll_call"]

A = TypeVar("A", str, int)

_POLL = 0.05, 1.0
"""Polling interval for replies in seconds: initial and maximum."""


class Grid(Protocol):
    """What is needed of Flower's grid, which ``TaskGrid`` has, too."""

    def get_node_ids(self) -> Iterable[int]:
        """Return Flower's ids of the nodes that are online."""
        ...

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages, and return their ids; an empty or missing one: Flower did not take the message."""
        ...

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to messages that are ready."""
        ...


class GridTransport(Transport):
    """Sends envelopes to nodes and waits for their replies.

    Args:
        grid: Flower's grid.
        nodes: Flower's node id of each client.
        patience: Seconds that a patient exchange waits for nodes that are not online.
    """

    def __init__(self, grid: Grid, nodes: Mapping[str, int], patience: float = 300.0) -> None:
        self.grid, self.nodes, self.patience = grid, nodes, patience

    def exchange(self, orders: Orders, on_reply: OnReply, seconds: float, *, patient: bool = False) -> None:
        """``Transport.exchange``."""
        for id, back in self._replies(orders, seconds, patient):
            if on_reply(id, back):
                return

    def _replies(self, orders: Orders, seconds: float, patient: bool) -> Iterator[tuple[str, Envelope | str]]:
        unsent, waiting = dict.fromkeys(orders), dict[str, str]()
        began, pause = time.monotonic(), _POLL[0]
        until, absent = began + seconds, began + (min(seconds, self.patience) if patient else 0.0)
        while True:
            online = set(self.grid.get_node_ids()) if unsent else set[int]()
            for id in [id for id in unsent if self.nodes[id] in online]:  # one by one: their bodies may be large
                if message := self._pushed(id, orders[id], until - time.monotonic()):
                    waiting[message] = id
                    del unsent[id]
            if time.monotonic() >= absent:
                lasting = f"was not online for {absent - began:g} s" if patient else "is not online"
                for id in sorted(unsent):
                    yield id, f"its node {lasting}"
                unsent.clear()
            came = False
            for id, back in _opened(self.grid, waiting):
                came = True
                yield id, back
            if not waiting and not unsent:
                return
            if time.monotonic() > until:
                break
            pause = _POLL[0] if came else min(2 * pause, _POLL[1])
            time.sleep(pause)
        for id in sorted(waiting.values()):
            yield id, f"no reply within {seconds:g} s"
        for id in sorted(unsent):
            yield id, f"its node was not online for {seconds:g} s"

    def _pushed(self, id: str, envelope: Envelope, seconds: float) -> str | None:
        """Send an envelope and return the message id, or None if Flower accepts no message for the node."""
        ttl, node = max(seconds, 0) + 60, self.nodes[id]
        message = Message(to_records(envelope), dst_node_id=node, message_type="train", ttl=ttl)
        (sent,) = self.grid.push_messages([message]) or (None,)
        return sent or None


def _opened(grid: Grid, waiting: dict[str, A]) -> Iterator[tuple[A, Envelope | str]]:
    """Yield the available replies with their senders, and remove their messages from ``waiting``."""
    for reply in grid.pull_messages(sorted(waiting)) if waiting else ():
        whose = waiting.pop(reply.metadata.reply_to_message_id, None)
        if whose is None:
            continue
        if reply.has_error():
            yield whose, f"its node failed (Flower's code {reply.error.code}: {reply.error.reason})"
            continue
        try:
            yield whose, from_records(reply.content)
        except ValueError as error:
            yield whose, str(error)


def roll_call(grid: Grid, count: int, seconds: float) -> dict[int, int]:
    """Query every node of a simulation for its partition number.

    Args:
        grid: Flower's grid.
        count: Number of nodes to wait for.
        seconds: Seconds to wait for the nodes, and again for their replies.

    Returns:
        Node ids by partition number.

    Raises:
        FedspanError: If some nodes do not reply.
    """
    until = time.monotonic() + seconds
    while len(nodes := list(grid.get_node_ids())) < count and time.monotonic() < until:
        time.sleep(_POLL[1])
    messages = [Message(RecordDict(), dst_node_id=node, message_type="query", ttl=seconds) for node in nodes]
    waiting = dict(zip(grid.push_messages(messages), nodes, strict=True))
    found: dict[int, int] = {}
    while waiting and time.monotonic() < until + seconds:
        for reply in grid.pull_messages(sorted(waiting)):
            node = waiting.pop(reply.metadata.reply_to_message_id)
            record = None if reply.has_error() else reply.content.get("fedspan.node")
            partition = record.get("partition") if isinstance(record, ConfigRecord) else None
            if isinstance(partition, int):
                found[partition] = node
        time.sleep(_POLL[0])
    if sorted(found) != list(range(count)):
        raise FedspanError(
            "nodes", sorted(found), problem=f"only {len(found)} of {count} nodes answered. See Flower's log"
        )
    return found


def invite(grid: Grid, envelope: Envelope, seconds: float) -> Iterator[tuple[int, Envelope | str]]:
    """Send an envelope to all current and newly connecting nodes until time is up or the caller stops iterating.

    Args:
        grid: Flower's grid.
        envelope: The invitation.
        seconds: Seconds to wait.

    Returns:
        Node ids with their replies, or with the reason for a missing reply in plain text.
    """
    until = time.monotonic() + seconds
    waiting: dict[str, int] = {}
    asked: set[int] = set()
    while time.monotonic() < until:
        for node in sorted(set(grid.get_node_ids()) - asked):
            left = max(1.0, until - time.monotonic())
            message = Message(to_records(envelope), dst_node_id=node, message_type="query", ttl=left + 60)
            asked.add(node)
            waiting.update({id: node for id in grid.push_messages([message]) if id})
        yield from _opened(grid, waiting)
        time.sleep(_POLL[1] / 2)


_PATIENCE = 60.0
"""Time limit for taking over a submitted run, in seconds."""


class LimitedGrid(TaskGrid):
    """A grid that stops fetching a reply at the size limit and has the SuperLink delete it."""

    most = 1 << 31
    """Maximum size of a reply, in bytes."""

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies that are ready; one that is too large or incomplete is replaced by an error."""
        messages: list[Message] = []
        for head in self.list_replies(message_ids):
            contents, why = None, ""
            try:
                contents = fetch_objects(head.tree, self.pull_object, self.most)
            except TooLarge as error:
                why = f"the reply has {pull_failure(error)}"
            except ObjectPullError as error:
                why = pull_failure(error)
            self.confirm(head)
            if contents is not None:
                try:
                    messages.append(assemble_message(head.id, contents, self.most))
                    continue
                except ValueError as error:
                    why = f"the reply: {error}"
            messages.append(self.make_error(head.reply_to, why))
        return messages


@contextmanager
def attach(link: ServerLink, most: int) -> Generator[LimitedGrid]:
    """Make this process the server of a new run on a SuperLink for the duration of the context.

    Args:
        link: Connection data of the SuperLink.
        most: Maximum size of a reply, in bytes.

    Raises:
        FedspanError: If the SuperLink is unreachable, refuses, rejects the secret, or later no longer knows the run.
    """
    run = int(call_flower(link, "run", "%", "@")["run-id"])
    authority = None if link.authority is None else link.authority.read_bytes()
    grid = LimitedGrid(link.address, authority, _take_over(link, authority, run))
    grid.most = most
    try:
        with grid.serve_task():
            yield grid
    except (httpx.HTTPError, RunNotRunningException) as error:
        problem = (
            f"{link.address} does not know this run: it was down for too long, or stopped the run. Continue "
            "with --resume"
        )
        raise FedspanError("server", link.address, problem=problem) from error


def _take_over(link: ServerLink, authority: bytes | None, run: int) -> str:
    """Take over the server part of a run and return its token.

    Raises:
        FedspanError: If the SuperLink refuses, or another process took over the run first.
    """
    try:
        token = acquire_task(link.address, authority, link.secret.read_bytes(), run, _PATIENCE)
    except httpx.HTTPStatusError as error:
        expected = f"the file that fedspan server wrote (the SuperLink answered {error.response.status_code})"
        raise FedspanError("secret", str(link.secret), expected) from error
    if token is None:
        raise FedspanError("server", link.address, "a SuperLink without a SuperExec of its own (fedspan server)")
    return token
