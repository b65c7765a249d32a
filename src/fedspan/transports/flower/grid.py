"""A run on a SuperLink served by this process: Flower's grid, within limits and for two readers.

In Flower, the SuperLink starts a ServerApp in a separate process, from a bundle that anyone who can reach it may
submit. Here the SuperLink starts nothing (``--isolation process`` without a SuperExec). A process that has the
SuperLink's secret takes over the run, and the process with the run folder and the terminal uses the grid.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Protocol

import httpx
from flwr.app import Message

from fedspan.errors import FedspanError
from fedspan.transports.flower.adapter import (
    PIECE_BYTES,
    ObjectPullError,
    ObjectUnavailableError,
    ReplyHead,
    RunNotRunningException,
    TaskGrid,
    acquire_task,
    list_tree_ids,
    pull_failure,
)
from fedspan.transports.flower.messages import assemble_message, describe_limit
from fedspan.transports.flower.server import ServerLink, call_flower
from fedspan.transports.flower.wire import parse_reply_limit

__all__ = ["Grid", "LimitedGrid", "SharedGrid", "attach"]

_WAIT = 1.0
"""Seconds for which the server's answer waits for replies."""
_RECORDS = 16
"""Maximum number of a reply's objects beside the pieces of its body."""
_PATIENCE = 60.0
"""Time limit for taking over a submitted run, in seconds."""


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


class SharedGrid:
    """A grid on which two readers wait for replies: what one of them fetches for the other one is held for it.

    The first reader is who uses this grid, the second one who uses ``side``. Only the first one fetches.

    Args:
        grid: Flower's grid.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid, self._held = grid, list[Message]()
        self._side_ids: frozenset[str] = frozenset()
        self.side = _Side(self)
        """The second reader's grid."""

    def get_node_ids(self) -> Iterable[int]:
        """``Grid.get_node_ids``."""
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """``Grid.push_messages``."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """``Grid.pull_messages``."""
        own = list[Message]()
        for message in self._grid.pull_messages(sorted({*message_ids, *self._side_ids})):
            order = message.metadata.reply_to_message_id
            (self._held if order in self._side_ids else own).append(message)
            self._side_ids -= {order}  # a request for a reply that has arrived makes the server send it again
        return own

    def push_side_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages of the second reader, and fetch their replies from now on."""
        ids = list(self._grid.push_messages(messages))
        self._side_ids |= {id for id in ids if id}
        return ids

    def take_held(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the second reader's messages that were fetched, and fetch the rest from now on."""
        held, self._held = self._held, []
        replied = {message.metadata.reply_to_message_id for message in held}
        self._side_ids = frozenset(message_ids) - replied
        return held


class _Side:
    """The second reader's view of a ``SharedGrid``."""

    def __init__(self, shared: SharedGrid) -> None:
        self._shared = shared

    def get_node_ids(self) -> Iterable[int]:
        """``Grid.get_node_ids``."""
        return self._shared.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """``Grid.push_messages``."""
        return self._shared.push_side_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """``Grid.pull_messages``."""
        return self._shared.take_held(message_ids)


class _Partial:
    """A reply whose objects have not all been fetched."""

    def __init__(self, head: ReplyHead, limit: int) -> None:
        self.head, self.contents, self.limit = head, dict(head.contents), limit
        self.missing = [] if self.contents else list_tree_ids(head.tree)
        self.size = sum(map(len, self.contents.values()))


class LimitedGrid(TaskGrid):
    """A grid that stops fetching a reply at the size limit, and never waits for an object that has not arrived.

    A node announces a reply before it sends the objects. What has not arrived is fetched at a later call, so a node
    that withholds an object delays its own reply only.
    """

    limit = 1 << 31
    """Maximum size of a reply to an order that names no smaller one, in bytes."""
    _limits: Mapping[str, int] = MappingProxyType({})
    _partial: Mapping[str, _Partial] = MappingProxyType({})
    _unanswered: frozenset[str] = frozenset()

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """``TaskGrid.push_messages``; the maximum sizes of the replies are stored.

        The caller requests the replies in its next call of ``pull_messages``: messages that it omits are cancelled.
        """
        sent = list(messages)
        ids = super().push_messages(sent)
        limits = dict(self._limits)
        for id, message in zip(ids, sent, strict=False):
            if id and (limit := parse_reply_limit(message.metadata.group_id)) is not None:
                limits[id] = min(limit, self.limit)
        self._limits = limits
        self._unanswered |= {id for id in ids if id}
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies that are complete; one that is too large or damaged is replaced by an error.

        Messages that were sent since the last call or were in it, and are neither in this one nor answered, are
        cancelled.
        """
        requested = set(message_ids)
        partial = {id: reply for id, reply in self._partial.items() if id in requested}
        for reply in self._partial.values():
            if reply.head.reply_to not in requested:
                self.confirm(reply.head)
        if abandoned := self._unanswered - requested:
            self.cancel_orders(sorted(abandoned))
        unanswered = sorted(requested - partial.keys())
        for head in self.take_replies(unanswered, 0.0 if partial else _WAIT) if unanswered else ():
            partial.setdefault(head.reply_to, _Partial(head, self._limits.get(head.reply_to, self.limit)))
        messages: list[Message] = []
        for reply_to, reply in list(partial.items()):
            message = self._continue(reply)
            if message is not None:
                if not reply.head.contents:
                    self.confirm(reply.head)
                messages.append(message)
                del partial[reply_to]
        self._partial = partial
        self._unanswered = frozenset(requested - {message.metadata.reply_to_message_id for message in messages})
        self._limits = {id: limit for id, limit in self._limits.items() if id in self._unanswered}
        return messages

    def _continue(self, reply: _Partial) -> Message | None:
        """Fetch the objects of a reply that have arrived; return the reply when it is complete, or an error."""
        try:
            if len(reply.missing) + len(reply.contents) > _RECORDS + reply.limit // PIECE_BYTES:
                raise ValueError("the reply has too many objects")
            if reply.size > reply.limit:
                raise ValueError(f"the reply has {describe_limit(reply.limit)}")
            while reply.missing:
                content = self.pull_object(reply.missing[-1])
                reply.size += len(content)
                if reply.size > reply.limit:
                    raise ValueError(f"the reply has {describe_limit(reply.limit)}")
                reply.contents[reply.missing.pop()] = content
            return assemble_message(reply.head.id, reply.contents, reply.limit)
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
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code >= 500:
            problem = (
                f"{link.address} failed with status {error.response.status_code}, perhaps because its disk is full: "
                "see superlink.log in its folder. Continue with --resume"
            )
        else:
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
