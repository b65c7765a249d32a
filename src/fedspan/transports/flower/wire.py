"""The door's own requests: an order or a reply with its objects in one request, instead of one request an object.

Flower's protocol takes about twenty requests to bring one order to a node and its reply back, and a node asks for
orders again and again. Nodes and the submitting process of fedspan use these paths instead:

- ``/fedspan/node/take-order``: the answer waits for an order (long polling), and brings its objects along;
- ``/fedspan/node/send-reply``: a reply with its objects; the order that it replies to counts as received;
- ``/fedspan/run/send-orders``: orders for many nodes with their objects;
- ``/fedspan/run/take-replies``: the answer waits for replies, and brings their objects along;
- ``/fedspan/run/cancel-orders``: orders whose replies are no longer awaited.

A body is a list of parts, each with its length before it: Flower's own message first, then the contents of objects,
whose names are their hashes. Objects that exceed ``INLINE_BYTES`` are fetched and sent one by one, as in Flower.

An order names the maximum size of its reply in the field of Flower's that holds a message's group. It is stored with
the order, so the door refuses what is larger, also after a restart, without asking the run's server.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "BATCH_BYTES",
    "CANCEL_ORDERS",
    "INLINE_BYTES",
    "NODE_PATH",
    "RUN_PATH",
    "SEND_ORDERS",
    "SEND_REPLY",
    "TAKE_ORDER",
    "TAKE_REPLIES",
    "format_reply_limit",
    "pack",
    "parse_reply_limit",
    "select_fitting",
    "unpack",
]

NODE_PATH, RUN_PATH = "/fedspan/node/", "/fedspan/run/"
"""Beginning of the paths for nodes, and for the submitting process."""
TAKE_ORDER, SEND_REPLY = "take-order", "send-reply"
SEND_ORDERS, TAKE_REPLIES, CANCEL_ORDERS = "send-orders", "take-replies", "cancel-orders"

INLINE_BYTES = 4 * 2**20 + 2**18
"""Maximum size of the objects that come along with one order or one reply, in bytes: a body in one piece, and the
records around it."""
BATCH_BYTES = 16 * 2**20
"""Maximum size of the objects that come along with several orders or replies, in bytes."""

_LENGTH = 4
_REPLY_LIMIT = "reply-bytes:"


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
