"""The last order of a run on a node: what was sent before is refused, unless the node was killed before it replied.

A node that was killed while it sent its reply is sent the order again. It does not carry it out a second time, but
gives the same reply, unless its data or its file have changed.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedspan.deployment.node_folder import LAST_REPLY
from fedspan.errors import FedspanError
from fedspan.federation.protocol import Count, Envelope
from fedspan.files import convert_disk_errors, read_bytes, write_atomic

_MAX_STARTS = 16
"""Number of times that a node starts to carry out one order: it may be the order that kills the process."""


class LastOrder(BaseModel):
    """The last order of a run.

    Args:
        digest: SHA-256 of its envelope.
        reply: SHA-256 of the reply, in its own file; empty: none is stored.
        context: Digest of what the reply depends on besides the order.
        starts: Number of times that the node has started to carry it out.
        is_recorded: Whether the node's record of usage has it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    serial: Count = 0
    digest: str = Field(default="", max_length=64)
    reply: str = Field(default="", max_length=64)
    context: str = Field(default="", max_length=64)
    is_closed: bool = False
    starts: Count = 0
    is_recorded: bool = False


def _compute_digest(envelope: Envelope) -> str:
    """Return a digest of an envelope from which it follows where the header ends."""
    return hashlib.sha256(f"{len(envelope.header)} {envelope.sha256}".encode()).hexdigest()


def load_last_order(path: Path) -> LastOrder:
    """Load the last order of a run from its file; if there is none, every serial is new."""
    if not path.is_file():
        return LastOrder()
    try:
        return LastOrder.model_validate_json(read_bytes(path))
    except (ValidationError, ValueError, RecursionError) as error:
        raise FedspanError(str(path), None, problem="the file is damaged. Remove its folder") from error


class LastOrderFile:
    """The last order of a run, from its arrival to the reply, on the disk.

    Args:
        path: The file; its folder is that of the run. Without this folder, the node does not participate in the run,
            and nothing is stored. The last reply is beside it.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._reply_path = path, path.with_name(LAST_REPLY)
        self._order: LastOrder | None = None

    @property
    def is_recorded(self) -> bool:
        """Whether the record of usage has the order, from an interrupted start."""
        return self._order is not None and self._order.is_recorded

    def begin(self, envelope: Envelope, serial: int) -> Envelope | None:
        """Store that an order arrived: a new one, or the last one, if it was interrupted before its reply.

        Returns:
            The reply to the order, if it is answered and its reply is there, which ``require_context`` checks; None: it
            is to be carried out.

        Raises:
            FedspanError: If the order was answered and its reply is not there, is older than the last one, differs
                from it with the same serial, or was started too often, or the disk cannot be written.
        """
        last, digest = load_last_order(self.path), _compute_digest(envelope)
        is_last = (serial, digest) == (last.serial, last.digest)
        if is_last and last.is_closed and (reply := self._load_reply(last)) is not None:
            self._order = last
            return reply
        if serial <= last.serial and (not is_last or last.is_closed):
            problem = f"order {serial} arrived before, or is older than order {last.serial}"
            raise FedspanError("serial", serial, problem=problem)
        order = last if is_last else LastOrder(serial=serial, digest=digest)
        if order.starts >= _MAX_STARTS:
            raise FedspanError("serial", serial, problem=f"order {serial} was interrupted {order.starts} times")
        self._order = order
        self._update(starts=order.starts + 1)
        self._remove_reply()
        return None

    def require_context(self, context: str) -> None:
        """Check that the reply to an answered order depends on what the node has now.

        Args:
            context: Digest of what a reply depends on besides the order.
        """
        if self._order is not None and self._order.context != context:
            problem = f"order {self._order.serial} was answered with other data or another node file"
            raise FedspanError("serial", self._order.serial, problem=problem)

    def mark_recorded(self) -> None:
        """Store that the record of usage has the order, which must not be charged twice."""
        self._update(is_recorded=True)

    def close(self, reply: Envelope | None = None, context: str = "") -> None:
        """Store that the order is answered, before its reply leaves the node: it is never carried out again.

        Args:
            reply: The reply, which is kept until the next order; None: none is kept. The order fails if the node is
                killed before the server has the reply and there is no room for it on the disk.
            context: Digest of what the reply depends on besides the order.
        """
        digest = ""
        if reply is not None and self._order is not None and self.path.parent.is_dir():
            with suppress(OSError):
                write_atomic(self._reply_path, reply.header.encode() + b"\n" + reply.body, 0o600)
                digest = _compute_digest(reply)
        self._update(reply=digest, context=context, is_closed=True)
        if self._order is not None and not digest:
            self._remove_reply()

    def _remove_reply(self) -> None:
        with suppress(OSError):
            self._reply_path.unlink(missing_ok=True)

    def _load_reply(self, order: LastOrder) -> Envelope | None:
        """Return the reply to an order; None: it is not there, or damaged."""
        try:
            header, _, body = read_bytes(self._reply_path).partition(b"\n")
            reply = Envelope(header.decode(), body)
        except (FedspanError, ValueError):
            return None
        return reply if order.reply and _compute_digest(reply) == order.reply else None

    def _update(self, **changes: Any) -> None:
        if self._order is None:
            return
        self._order = self._order.model_copy(update=changes)
        if self.path.parent.is_dir():
            with convert_disk_errors(self.path.parent, "free some space on the node"):
                write_atomic(self.path, self._order.model_dump_json().encode())
