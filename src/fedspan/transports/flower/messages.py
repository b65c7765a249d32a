"""Messages between server and nodes through Flower: records, and encoding of envelopes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedspan.federation.protocol import Envelope
from fedspan.transports.flower.adapter import ObjectPullError, ObjectTree, array_layout, inflate_message, pull_tree

__all__ = ["SMALL", "TooLarge", "assemble_message", "fetch_objects", "from_records", "to_records", "whole_bytes"]

SMALL = 4 * 2**20
"""Maximum size in bytes of a body that is sent as one piece, which a lost connection forces to resend."""
_HEADER, _BODY = "fedspan.header", "fedspan.body"
_STYPE = "fedspan.bytes"


def to_records(envelope: Envelope) -> RecordDict:
    """Convert an envelope to the content of a Flower message."""
    header, data = ConfigRecord({"header": envelope.header}), envelope.body
    if len(data) <= SMALL:
        return RecordDict({_HEADER: header, _BODY: ConfigRecord({"body": data})})
    body = Array(dtype="uint8", shape=(len(data),), stype=_STYPE, data=data)
    return RecordDict({_HEADER: header, _BODY: ArrayRecord({"body": body})})


def from_records(records: RecordDict) -> Envelope:
    """Convert the content of a Flower message to an envelope.

    Raises:
        ValueError: If it is not the output of ``to_records``; no input raises any other error.
    """
    if set(records) != {_HEADER, _BODY}:
        raise ValueError(f"records {sorted(records)[:4]}, not {sorted((_HEADER, _BODY))}")
    header, body = records[_HEADER], records[_BODY]
    if not isinstance(header, ConfigRecord) or not isinstance(body, ConfigRecord | ArrayRecord):
        raise ValueError("records of other kinds than fedspan's")
    text = header.get("header")
    if set(header) != {"header"} or not isinstance(text, str) or set(body) != {"body"}:
        raise ValueError("records hold something else than a header and a body")
    data = body["body"]
    if isinstance(data, Array) and (data.dtype, data.stype, tuple(data.shape)) == ("uint8", _STYPE, (len(data.data),)):
        data = data.data
    if not isinstance(data, bytes):
        raise ValueError("the body is no bytes")
    return Envelope(text, data)


class TooLarge(ObjectPullError):
    """Raised when a message's objects exceed the maximum size."""


def fetch_objects(tree: ObjectTree, pull: Callable[[str], bytes], most: int) -> dict[str, bytes]:
    """Fetch a message's objects; after the one that exceeds the maximum size, no other is fetched.

    Args:
        tree: The ids of the message's objects.
        pull: Fetches one object.
        most: Maximum size of all objects together, in bytes.

    Returns:
        The objects' contents by id.

    Raises:
        TooLarge: If the objects exceed the maximum size.
        ObjectPullError: If an object is missing.
    """
    taken = 0

    def counted(id: str) -> bytes:
        nonlocal taken
        if taken <= most:
            data = pull(id)
            taken += len(data)
            if taken <= most:
                return data
        raise TooLarge(id, _limit(most))

    return pull_tree(tree, counted)


def assemble_message(id: str, contents: dict[str, bytes], most: int) -> Message:
    """Assemble a message.

    Args:
        id: Id of the message's object.
        contents: The message's objects, including nested ones; they are removed, which saves memory.
        most: Maximum size of the message, in bytes.

    Raises:
        ValueError: If it is not a message or exceeds the maximum size.
    """
    try:
        if whole_bytes(contents) > most:
            raise ValueError(f"it has {_limit(most)}")
        message = inflate_message(id, contents)
    except ValueError:
        raise
    except Exception as error:  # Flower's code assumes that Flower wrote the objects
        raise ValueError(f"no message of Flower's ({type(error).__name__})") from error
    if message is None:
        raise ValueError("no message of Flower's")
    return message


def whole_bytes(contents: Mapping[str, bytes]) -> int:
    """Return the size of the objects, in bytes, after every array is assembled from its pieces."""
    total = 0
    for content in contents.values():
        total += len(content)
        layout = array_layout(content)
        if layout is not None:
            pieces, positions = layout
            sizes = [len(contents[piece]) for piece in pieces]
            total += sum(sizes[position] for position in positions) - sum(sizes)
    return total


def _limit(most: int) -> str:
    return f"more than {most / 2**20:g} MiB, the most that is taken"
