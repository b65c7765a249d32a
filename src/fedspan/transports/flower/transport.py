"""The server side of a deployment: a transport over Flower's grid, and a run on a SuperLink served by this process.

In Flower, the SuperLink starts a ServerApp in a separate process, from a bundle that anyone who can reach it may
submit. Here the SuperLink starts nothing (``--isolation process`` without a SuperExec). A process that has the
SuperLink's secret takes over the run, and the process with the run folder and the terminal uses the grid.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

import httpx
from flwr.app import ConfigRecord, Message, RecordDict

from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope, OnReply, Orders, Transport
from fedspan.transports.flower.adapter import (
    PIECE_BYTES,
    ObjectPullError,
    ObjectPushError,
    ObjectUnavailableError,
    ReplyHead,
    RunNotRunningException,
    TaskGrid,
    acquire_task,
    pull_failure,
    tree_ids,
)
from fedspan.transports.flower.messages import assemble_message, describe_limit, from_records, new_salt, to_records
from fedspan.transports.flower.server import ServerLink, call_flower
from fedspan.transports.flower.signing import Signer, UnsignedSigner

__all__ = ["Grid", "GridTransport", "attach", "invite", "roll_call"]

A = TypeVar("A", str, int)

_REINVITE_SECONDS = 5.0
"""Seconds after which a node that has not decided is invited again."""
_REVOKED = "its node's key was revoked"
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
        signer: Signs orders and verifies replies; None: neither.
        revoked: Returns the nodes whose keys were revoked, which no exchange waits for.
    """

    def __init__(
        self,
        grid: Grid,
        nodes: Mapping[str, int],
        patience: float = 300.0,
        signer: Signer | None = None,
        revoked: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self.grid, self.nodes, self.patience = grid, nodes, patience
        self.signer, self.revoked = signer or UnsignedSigner(), revoked

    def exchange(self, orders: Orders, on_reply: OnReply, seconds: float, *, patient: bool = False) -> None:
        """``Transport.exchange``."""
        for id, reply in self._replies(orders, seconds, patient):
            if on_reply(id, reply):
                return

    def _replies(self, orders: Orders, seconds: float, patient: bool) -> Iterator[tuple[str, Envelope | str]]:
        unsent, pending = dict.fromkeys(orders), dict[str, _Sent[str]]()
        started, pause = time.monotonic(), _POLL[0]
        deadline, offline_until = started + seconds, started + (min(seconds, self.patience) if patient else 0.0)
        while True:
            gone = self.revoked()
            for id in [id for id in unsent if self.nodes[id] in gone]:
                del unsent[id]
                yield id, _REVOKED
            for message, sent in list(pending.items()):
                if sent.node in gone:
                    del pending[message]
                    yield sent.to, _REVOKED
            online = set(self.grid.get_node_ids()) if unsent else set[int]()
            salt = new_salt()
            for id in [id for id in unsent if self.nodes[id] in online]:  # one by one: their bodies may be large
                lifetime = max(deadline - time.monotonic(), 0) + 60
                try:
                    sent = _send(self.grid, self.signer, orders[id], id, self.nodes[id], "train", lifetime, salt)
                except ObjectPushError:  # its node deleted the message while it was sent
                    del unsent[id]
                    salt = new_salt()  # no object of the next message may have a name that this node knows
                    yield id, "its node confirmed an order that it had not received"
                    continue
                except httpx.HTTPStatusError as error:
                    if error.response.status_code < 500:
                        raise
                    salt = (
                        new_salt()
                    )  # somebody announced the body's name with other children: sent again under another
                    continue
                if sent:
                    pending.update(sent)
                    del unsent[id]
            if time.monotonic() >= offline_until:
                reason = f"was not online for {offline_until - started:g} s" if patient else "is not online"
                for id in sorted(unsent):
                    yield id, f"its node {reason}"
                unsent.clear()
            received_any = False
            for id, reply in _receive(self.grid, self.signer, pending):
                received_any = True
                yield id, reply
            if not pending and not unsent:
                return
            if time.monotonic() > deadline:
                break
            pause = _POLL[0] if received_any else min(2 * pause, _POLL[1])
            time.sleep(pause)
        for id in sorted(sent.to for sent in pending.values()):
            yield id, f"no reply within {seconds:g} s"
        for id in sorted(unsent):
            yield id, f"its node was not online for {seconds:g} s"


@dataclass(frozen=True)
class _Sent(Generic[A]):
    """A message without a reply: who it was sent to, that node's id, and its nonce."""

    to: A
    node: int
    nonce: bytes


def _send(
    grid: Grid, signer: Signer, envelope: Envelope, to: A, node: int, kind: str, seconds: float, salt: bytes
) -> dict[str, _Sent[A]]:
    """Send an envelope, and return it by its message id; empty if Flower accepts no message for the node."""
    sealed = signer.seal(envelope, node)
    message = Message(to_records(sealed, salt), dst_node_id=node, message_type=kind, ttl=seconds)
    (id,) = grid.push_messages([message]) or (None,)
    return {id: _Sent(to, node, sealed.nonce)} if id else {}


def _receive(grid: Grid, signer: Signer, pending: dict[str, _Sent[A]]) -> Iterator[tuple[A, Envelope | str]]:
    """Yield the available replies with their senders, and remove their messages from ``pending``."""
    for reply in grid.pull_messages(sorted(pending)) if pending else ():
        sent = pending.pop(reply.metadata.reply_to_message_id, None)
        if sent is None:
            continue
        if reply.has_error():
            yield sent.to, f"its node failed (Flower's code {reply.error.code}: {reply.error.reason})"
            continue
        try:
            yield sent.to, signer.open(from_records(reply.content), sent.node, sent.nonce)
        except ValueError as error:
            yield sent.to, str(error)


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
    deadline = time.monotonic() + seconds
    while len(nodes := list(grid.get_node_ids())) < count and time.monotonic() < deadline:
        time.sleep(_POLL[1])
    messages = [Message(RecordDict(), dst_node_id=node, message_type="query", ttl=seconds) for node in nodes]
    pending = dict(zip(grid.push_messages(messages), nodes, strict=True))
    nodes_by_partition: dict[int, int] = {}
    while pending and time.monotonic() < deadline + seconds:
        for reply in grid.pull_messages(sorted(pending)):
            node = pending.pop(reply.metadata.reply_to_message_id)
            record = None if reply.has_error() else reply.content.get("fedspan.node")
            partition = record.get("partition") if isinstance(record, ConfigRecord) else None
            if isinstance(partition, int):
                nodes_by_partition[partition] = node
        time.sleep(_POLL[0])
    if sorted(nodes_by_partition) != list(range(count)):
        raise FedspanError(
            "nodes",
            sorted(nodes_by_partition),
            problem=f"only {len(nodes_by_partition)} of {count} nodes answered. See Flower's log",
        )
    return nodes_by_partition


def invite(
    grid: Grid,
    envelope: Envelope,
    seconds: float,
    signer: Signer | None = None,
    undecided: set[int] | None = None,
) -> Iterator[tuple[int, Envelope | str]]:
    """Send an envelope to all current and newly connecting nodes until time is up or the caller stops iterating.

    Args:
        grid: Flower's grid.
        envelope: The invitation.
        seconds: Seconds to wait.
        signer: Signs the invitation and verifies replies; None: neither.
        undecided: Nodes that are invited again some seconds later. The caller adds nodes that have not decided yet.

    Returns:
        Node ids with their replies, or with the reason for a missing reply in plain text.
    """
    deadline = time.monotonic() + seconds
    pending: dict[str, _Sent[int]] = {}
    invited_at: dict[int, float] = {}
    to_reinvite = set[int]() if undecided is None else undecided
    signer = signer or UnsignedSigner()
    while time.monotonic() < deadline:
        salt, now = new_salt(), time.monotonic()
        for node in sorted(set(grid.get_node_ids())):
            if node in invited_at and (node not in to_reinvite or now - invited_at[node] < _REINVITE_SECONDS):
                continue
            remaining = max(1.0, deadline - now)
            invited_at[node] = now
            to_reinvite.discard(node)
            try:
                pending.update(_send(grid, signer, envelope, node, node, "query", remaining + 60, salt))
            except ObjectPushError:
                salt = new_salt()
                yield node, "it confirmed an invitation that it had not received"
        yield from _receive(grid, signer, pending)
        time.sleep(_POLL[1] / 2)


_RECORDS = 16
"""Maximum number of a reply's objects beside the pieces of its body."""
_PATIENCE = 60.0
"""Time limit for taking over a submitted run, in seconds."""


class _Partial:
    """A reply whose objects have not all been fetched."""

    def __init__(self, head: ReplyHead) -> None:
        self.head, self.missing = head, tree_ids(head.tree)
        self.contents: dict[str, bytes] = {}
        self.size = 0


class LimitedGrid(TaskGrid):
    """A grid that stops fetching a reply at the size limit, and never waits for an object that has not arrived.

    A node announces a reply before it sends the objects. What has not arrived is fetched at a later call, so a node
    that withholds an object delays its own reply only.
    """

    limit = 1 << 31
    """Maximum size of a reply, in bytes."""
    _partial: Mapping[str, _Partial] = MappingProxyType({})

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies that are complete; one that is too large or damaged is replaced by an error."""
        requested = set(message_ids)
        partial = {id: reply for id, reply in self._partial.items() if id in requested}
        for reply in self._partial.values():
            if reply.head.reply_to not in requested:
                self.confirm(reply.head)
        for head in self.list_replies(sorted(requested - partial.keys())):
            partial.setdefault(head.reply_to, _Partial(head))
        messages: list[Message] = []
        for reply_to, reply in list(partial.items()):
            message = self._continue(reply)
            if message is not None:
                self.confirm(reply.head)
                messages.append(message)
                del partial[reply_to]
        self._partial = partial
        return messages

    def _continue(self, reply: _Partial) -> Message | None:
        """Fetch the objects of a reply that have arrived; return the reply when it is complete, or an error."""
        try:
            if len(reply.missing) + len(reply.contents) > _RECORDS + self.limit // PIECE_BYTES:
                raise ValueError("the reply has too many objects")
            while reply.missing:
                content = self.pull_object(reply.missing[-1])
                reply.size += len(content)
                if reply.size > self.limit:
                    raise ValueError(f"the reply has {describe_limit(self.limit)}")
                reply.contents[reply.missing.pop()] = content
            return assemble_message(reply.head.id, reply.contents, self.limit)
        except ObjectUnavailableError:
            return None
        except ObjectPullError as error:
            return self.make_error(reply.head.reply_to, pull_failure(error))
        except ValueError as error:
            return self.make_error(reply.head.reply_to, str(error))


@contextmanager
def attach(link: ServerLink, limit: int) -> Generator[LimitedGrid]:
    """Make this process the server of a new run on a SuperLink for the duration of the context.

    Args:
        link: Connection data of the SuperLink.
        limit: Maximum size of a reply, in bytes.

    Raises:
        FedspanError: If the SuperLink is unreachable, refuses, rejects the secret, or later no longer knows the run.
    """
    run = int(call_flower(link, "run", "%", "@")["run-id"])
    authority = None if link.authority is None else link.authority.read_bytes()
    grid = LimitedGrid(link.address, authority, _take_over(link, authority, run))
    grid.limit = limit
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
