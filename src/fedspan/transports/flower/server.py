"""The server half of the app: a transport over Flower's grid, and invitations to the nodes that are online."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import TypeVar

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from fedspan.errors import escape_controls
from fedspan.federation.protocol import Envelope
from fedspan.federation.transport import OnReply, Orders, Transport
from fedspan.transports.flower.client import from_records, to_records

__all__ = ["Context", "Grid", "GridTransport", "create_server_app", "invite"]

T = TypeVar("T", str, int)

_POLL = 0.05, 1.0
"""Polling interval for replies in seconds: initial and maximum."""
_LIFETIME = 60.0
"""Seconds for which a message outlives its time limit."""
_REINVITE_SECONDS = 10.0
"""Seconds after which a node that has not decided is invited again; each invitation starts a process on it."""
_LONGEST_REASON = 500
"""Maximum number of characters of the reason that comes with a failure."""


def create_server_app(run: Callable[[Grid, Context], None]) -> ServerApp:
    """Create the server app, which runs a federation over Flower's grid."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:  # pyright: ignore[reportUnusedFunction]
        run(grid, context)

    return app


class GridTransport(Transport):
    """Sends envelopes to Flower's nodes and waits for their replies.

    Flower's public interface cancels no message: a node trains on after its order's time limit, until its own limits
    end that, and the reply is discarded.

    Args:
        reconnect_timeout: Time limit for offline nodes in an exchange that waits for them, in seconds.
    """

    def __init__(self, grid: Grid, nodes: Mapping[str, int], reconnect_timeout: float) -> None:
        self._grid, self._nodes, self._reconnect_timeout = grid, nodes, reconnect_timeout

    def exchange(self, orders: Orders, on_reply: OnReply, seconds: float, *, wait_for_offline: bool = False) -> None:
        started, pause = time.monotonic(), _POLL[0]
        unsent, pending = dict.fromkeys(orders), dict[str, str]()
        wait = min(seconds, self._reconnect_timeout) if wait_for_offline else 0.0
        while unsent or pending:
            pause = min(2 * pause, _POLL[1])
            for id, reply in self._receive(orders, unsent, pending, started, seconds, wait):
                if on_reply(id, reply):
                    return
                pause = _POLL[0]
            if unsent or pending:
                time.sleep(pause)

    def _receive(
        self,
        orders: Orders,
        unsent: dict[str, None],
        pending: dict[str, str],
        started: float,
        seconds: float,
        wait: float,
    ) -> Iterator[tuple[str, Envelope | str]]:
        """Send orders to online nodes, and yield replies and failures; both are removed from the inputs."""
        online = set(self._grid.get_node_ids()) if unsent else set[int]()
        for id in [id for id in unsent if self._nodes[id] in online]:
            del unsent[id]
            message = _push(self._grid, self._nodes[id], orders[id], seconds)
            if message is None:
                yield id, "the SuperLink did not take its order"
            else:
                pending[message] = id
        waited = time.monotonic() - started
        if waited >= wait:
            yield from ((id, "its node is not online") for id in unsent)
            unsent.clear()
        for id, reply in _pull(self._grid, pending):
            limit = orders.compute_reply_bytes(id)
            is_long = isinstance(reply, Envelope) and limit is not None and len(reply.body) > limit
            yield id, f"its reply has more than {limit} bytes, the maximum" if is_long else reply
        if waited >= seconds:
            yield from ((id, f"no reply within {seconds:g} s") for id in pending.values())
            pending.clear()


def invite(grid: Grid, envelope: Envelope, seconds: float, undecided: set[int]) -> Iterator[tuple[int, Envelope | str]]:
    """Send an envelope to all nodes that are or come online, until time is up or the caller stops iterating.

    Args:
        undecided: Nodes that are invited again some seconds later. The caller adds nodes that have not decided yet.

    Returns:
        Node ids with their replies, or with the reason for a missing reply in plain text.
    """
    deadline, pause = time.monotonic() + seconds, _POLL[0]
    invited_at, pending = dict[int, float](), dict[str, int]()
    while (now := time.monotonic()) < deadline:
        online = set(grid.get_node_ids())
        invited_at = {node: at for node, at in invited_at.items() if node in online}
        for node in sorted(online):
            is_due = node in undecided and now - invited_at.get(node, now) >= _REINVITE_SECONDS
            if node not in invited_at or is_due:
                invited_at[node] = now
                undecided.discard(node)
                message = _push(grid, node, envelope, deadline - now)
                if message is None:
                    undecided.add(node)
                else:
                    pending[message] = node
        for node, reply in _pull(grid, pending):
            yield node, "its introduction has a body" if isinstance(reply, Envelope) and reply.body else reply
        time.sleep(pause)
        pause = min(2 * pause, _POLL[1])


def _push(grid: Grid, node: int, envelope: Envelope, seconds: float) -> str | None:
    """Send an envelope, and return the id of its message; None: the SuperLink refused it."""
    content = to_records(envelope.header, envelope.body)
    return next(iter(grid.push_messages([Message(content, node, "train", ttl=seconds + _LIFETIME)])), None)


def _pull(grid: Grid, pending: MutableMapping[str, T]) -> Iterator[tuple[T, Envelope | str]]:
    """Yield the recipients of messages with their replies, or with the reason for a missing one.

    Flower reports no size before it has received a message whole, so messages are pulled one by one: the next is
    received when this one has been processed.
    """
    for id in sorted(pending):
        for message in grid.pull_messages([id]):
            recipient = pending.pop(message.metadata.reply_to_message_id, None)
            if recipient is not None:
                yield recipient, _read(message)


def _read(message: Message) -> Envelope | str:
    if message.has_error():
        reason = escape_controls((message.error.reason or "none")[:_LONGEST_REASON])
        return f"its node failed (Flower's code {message.error.code}: {reason})"
    try:
        return Envelope(*from_records(message.content))
    except ValueError as error:
        return str(error)
