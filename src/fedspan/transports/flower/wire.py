"""The door's own requests: an order or a reply with its objects in one request, instead of one request an object.

Flower's protocol takes about twenty requests to bring one order to a node and its reply back, and a node asks for
orders again and again. Nodes and the submitting process of fedspan use these paths instead:

- ``/fedspan/node/take-order``: the answer waits for an order (long polling), and brings its objects along;
- ``/fedspan/node/send-reply``: a reply with its objects; the order that it replies to counts as received;
- ``/fedspan/node/upload-offset``: how many bytes of an interrupted request's body the door has, or the answer to it;
- ``/fedspan/node/fetch-base``: bytes of a file of a base model that the server offers;
- ``/fedspan/run/send-orders``: orders for many nodes with their objects;
- ``/fedspan/run/take-replies``: the answer waits for replies, and brings their objects along;
- ``/fedspan/run/cancel-orders``: orders whose replies are no longer awaited.

A body is a list of parts, each with its length before it: Flower's own message first, then the contents of objects,
whose names are their hashes. Objects that exceed ``INLINE_BYTES`` are fetched and sent one by one, as in Flower.

An order names the maximum size of its reply in the field of Flower's that holds a message's group. It is stored with
the order, so the door refuses what is larger, also after a restart, without asking the run's server.

A connection that breaks costs little of a long body. A node names the body of such a request by its SHA-256
(``UPLOAD_HEADER``); the door keeps what has arrived, and the node sends the rest (``uploads``). A long answer has an
``ETag``, by which the node requests the rest with ``Range`` and ``If-Range`` (RFC 9110).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

__all__ = [
    "BASE_BYTES",
    "BATCH_BYTES",
    "CANCEL_ORDERS",
    "FETCH_BASE",
    "INLINE_BYTES",
    "NODE_PATH",
    "PROGRESS_HEADER",
    "RESUMABLE_BYTES",
    "RUN_PATH",
    "SEND_ORDERS",
    "SEND_REPLY",
    "STOPPED_HEADER",
    "TAKEN",
    "TAKE_ORDER",
    "TAKE_REPLIES",
    "UPLOAD_HEADER",
    "UPLOAD_OFFSET",
    "WORK_HEADER",
    "NodeWork",
    "UploadPart",
    "compute_tag",
    "format_progress",
    "format_reply_limit",
    "pack",
    "parse_offset",
    "parse_progress",
    "parse_reply_limit",
    "parse_upload",
    "parse_work",
    "read_first",
    "select_fitting",
    "unpack",
]

NODE_PATH, RUN_PATH = "/fedspan/node/", "/fedspan/run/"
"""Beginning of the paths for nodes, and for the submitting process."""
TAKE_ORDER, SEND_REPLY, UPLOAD_OFFSET = "take-order", "send-reply", "upload-offset"
FETCH_BASE = "fetch-base"
SEND_ORDERS, TAKE_REPLIES, CANCEL_ORDERS = "send-orders", "take-replies", "cancel-orders"

INLINE_BYTES = 4 * 2**20 + 2**18
"""Maximum size of the objects that come along with one order or one reply, in bytes: a body in one piece, and the
records around it."""
BATCH_BYTES = 16 * 2**20
"""Maximum size of the objects that come along with several orders or replies, in bytes."""

BASE_BYTES = 2**20
"""Maximum number of bytes of a base model's file that come with one answer."""
RESUMABLE_BYTES = 2**16
"""Size in bytes from which on the body of a request or of an answer can be resumed."""
UPLOAD_HEADER = "fedspan-upload"
"""Header of a request whose body can be resumed: the fields of an ``UploadPart`` with slashes between."""
PROGRESS_HEADER = "fedspan-progress"
"""Header of a request for a part of a message: the bytes that the node has, and the message's size."""
STOPPED_HEADER = "fedspan-stopped"
"""Header of a node's notice that it goes offline because it is stopped, and does not connect again at once."""
WORK_HEADER = "fedspan-work"
"""Header of a node's heartbeat: what it does, and how much of that is done in percent, for the server's web page."""
TAKEN = b"taken:"
"""What stands before the answer to a request whose body has arrived as a whole, in place of an offset."""

_LENGTH = 4
_REPLY_LIMIT = "reply-bytes:"
_UPLOAD = re.compile(rb"([0-9a-f]{64})" + 4 * rb"/([0-9]{1,10})")
_RANGE = re.compile(rb"bytes=([0-9]{1,10})-")
_WORK = re.compile(rb"([a-z][a-z ]{0,30})/([0-9]{1,3})?")
_PROGRESS = re.compile(rb"([0-9]{1,12})/([0-9]{1,12})")


def format_reply_limit(limit: int | None) -> str:
    """Return the group of an order whose reply has a maximum size.

    Args:
        limit: Maximum size of the reply's objects together, in bytes; None: the door's own limit.
    """
    return "" if limit is None else f"{_REPLY_LIMIT}{limit}"


def parse_reply_limit(group: str) -> int | None:
    """Return the maximum size of a reply in bytes that the group of its order names; None: it names none."""
    digits = group.removeprefix(_REPLY_LIMIT)
    return int(digits) if group.startswith(_REPLY_LIMIT) and digits.isdecimal() and len(digits) < 20 else None


class UploadPart(NamedTuple):
    """The part of a body that a request sends.

    Args:
        digest: SHA-256 of the whole body, in hexadecimal digits.
        offset: Number of bytes before the part.
        total: Size of the whole body, in bytes.
        sent: Bytes of the message that were sent with other requests, as the node says: for the log.
        message: Size of the message in bytes, as the node says.
    """

    digest: str
    offset: int
    total: int
    sent: int = 0
    message: int = 0

    def to_header(self) -> str:
        """Return the value of ``UPLOAD_HEADER``."""
        return "/".join(map(str, self))


def parse_upload(headers: Mapping[bytes, bytes]) -> UploadPart | None:
    """Return the part of a body that a request's headers declare; None: the body is sent as a whole.

    Args:
        headers: The headers by name in lower case.

    Raises:
        ValueError: If the header is not valid.
    """
    value = headers.get(UPLOAD_HEADER.encode())
    if value is None:
        return None
    match = _UPLOAD.fullmatch(value)
    if match is None or int(match[2]) > int(match[3]):
        raise ValueError("not a SHA-256 and four numbers, of which the first is at most the second")
    return UploadPart(match[1].decode("ascii"), *(int(number) for number in match.groups()[1:]))


def format_progress(done: int, total: int) -> str:
    """Return the value of ``PROGRESS_HEADER``."""
    return f"{done}/{total}"


def parse_progress(headers: Mapping[bytes, bytes]) -> tuple[int, int]:
    """Return how many bytes of a message a node has, and the message's size (0: unknown), as it says: for the log.

    Args:
        headers: The headers by name in lower case.
    """
    match = _PROGRESS.fullmatch(headers.get(PROGRESS_HEADER.encode(), b""))
    return (0, 0) if match is None else (int(match[1]), int(match[2]))


class NodeWork(NamedTuple):
    """What a node does.

    Args:
        doing: In small letters and blanks, such as ``training``.
        percent: How much of that is done; None: unknown.
    """

    doing: str
    percent: int | None

    def to_header(self) -> str:
        """Return the value of ``WORK_HEADER``."""
        return f"{self.doing}/{'' if self.percent is None else self.percent}"


def parse_work(headers: Mapping[bytes, bytes]) -> NodeWork | None:
    """Return what a node does, as it says; None: it does not say.

    Args:
        headers: The headers by name in lower case.
    """
    match = _WORK.fullmatch(headers.get(WORK_HEADER.encode(), b""))
    if match is None:
        return None
    return NodeWork(match[1].decode("ascii"), None if match[2] is None else min(100, int(match[2])))


def parse_offset(headers: Mapping[bytes, bytes], tag: str, total: int) -> int:
    """Return the number of an answer's bytes that a request's headers ask to leave out; 0: the whole answer.

    Args:
        headers: The headers by name in lower case.
        tag: The answer's ``ETag``.
        total: Size of the answer, in bytes.
    """
    match = _RANGE.fullmatch(headers.get(b"range", b""))
    if match is None or headers.get(b"if-range") != tag.encode("ascii") or int(match[1]) >= total:
        return 0
    return int(match[1])


def compute_tag(name: bytes, total: int) -> str:
    """Return the ``ETag`` of an answer.

    Args:
        name: What determines the answer's content together with its size.
        total: Size of the answer, in bytes.
    """
    return f'"{hashlib.sha256(name).hexdigest()}-{total}"'


def pack(parts: Iterable[bytes]) -> bytes:
    """Join parts, each with its length before it."""
    joined = list[bytes]()
    for part in parts:
        joined += [len(part).to_bytes(_LENGTH, "big"), part]
    return b"".join(joined)


def unpack(data: bytes, most: int) -> list[bytes]:
    """Split what ``pack`` joined.

    Args:
        data: The joined parts.
        most: Maximum number of parts.

    Raises:
        ValueError: If the data are no joined parts, or more than ``most``.
    """
    parts, start = list[bytes](), 0
    while start < len(data):
        end = start + _LENGTH
        end += int.from_bytes(data[start:end], "big")
        if end > len(data) or len(parts) == most:
            raise ValueError(f"not at most {most} parts with their lengths before them")
        parts.append(data[start + _LENGTH : end])
        start = end
    return parts


def read_first(data: bytes) -> bytes:
    """Return the first of the parts that ``pack`` joined."""
    return data[_LENGTH : _LENGTH + int.from_bytes(data[:_LENGTH], "big")]


def select_fitting(contents: Iterable[bytes], most: int) -> list[bytes]:
    """Return the first contents that fit into a size together.

    Args:
        contents: Contents of objects; those after the first one that does not fit are not computed.
        most: Maximum size of all of them together, in bytes.
    """
    selected, size = list[bytes](), 0
    for content in contents:
        size += len(content)
        if size > most:
            break
        selected.append(content)
    return selected
