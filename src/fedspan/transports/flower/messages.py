"""Messages between server and nodes through Flower: sealed envelopes as records, with a limit on their size.

An envelope's body is a safetensors payload (``federation.serialization``), so every dtype arrives bit for bit,
including bfloat16, which Flower's own records lack. In Flower, every record, array and piece of an array is a separate
object with its own requests and database rows; equal objects are stored once. So a body has a separate record, which
the orders of a round share: plain bytes (four objects per message) or, if it is large, an array, which Flower sends in
pieces (six or more objects).

Objects are named by the hash of their content. Anyone who can guess a name can announce the object with children that
it does not have, and the SuperLink then refuses the real one. So every header has a nonce, and every body is enciphered
with a salt that is sent with it: not to hide it, but to make the names of its pieces unpredictable.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedspan.federation.protocol import Envelope
from fedspan.transports.flower.adapter import (
    ObjectPullError,
    ObjectTree,
    inflate_message,
    list_parent_ids,
    list_tree_ids,
    pull_all,
    read_array_bytes,
    read_array_layout,
)
from fedspan.transports.flower.signing import Sealed

__all__ = [
    "SMALL",
    "TooLarge",
    "assemble_message",
    "count_assembled_bytes",
    "describe_limit",
    "draw_salt",
    "fetch_objects",
    "from_records",
    "to_records",
]

SMALL = 4 * 2**20
"""Maximum size in bytes of a body that is sent as one piece, which a lost connection forces to resend."""
_HEADER, _BODY = "fedspan.header", "fedspan.body"
_STYPE = "fedspan.bytes"
_SALT_BYTES = 16


def draw_salt() -> bytes:
    """Return a new salt. Equal bodies that are sent with one salt are equal objects."""
    return secrets.token_bytes(_SALT_BYTES)


def to_records(sealed: Sealed, salt: bytes) -> RecordDict:
    """Convert a sealed envelope to the content of a Flower message.

    Args:
        sealed: The sealed envelope.
        salt: The salt of its body, from ``draw_salt``; none that was sent before, outside the same batch of messages.
    """
    header = ConfigRecord(
        {"header": sealed.envelope.header, "nonce": sealed.nonce, "signature": sealed.signature, "salt": salt}
    )
    data = _scramble(sealed.envelope.body, salt)
    if len(data) <= SMALL:
        # the salt makes an empty body unpredictable, too
        return RecordDict({_HEADER: header, _BODY: ConfigRecord({"body": data, "salt": salt})})
    body = Array(dtype="uint8", shape=(len(data),), stype=_STYPE, data=data)
    return RecordDict({_HEADER: header, _BODY: ArrayRecord({"body": body})})


def from_records(records: RecordDict) -> Sealed:
    """Convert the content of a Flower message to a sealed envelope.

    Raises:
        ValueError: If it is not the output of ``to_records``; no input raises any other error.
    """
    if set(records) != {_HEADER, _BODY}:
        raise ValueError(f"records {sorted(records)[:4]}, not {sorted((_HEADER, _BODY))}")
    header, body = records[_HEADER], records[_BODY]
    if not isinstance(header, ConfigRecord) or not isinstance(body, ConfigRecord | ArrayRecord):
        raise ValueError("records of other kinds than fedspan's")
    if set(header) != {"header", "nonce", "signature", "salt"} or set(body) - {"salt"} != {"body"}:
        raise ValueError("a header or a body of other fields than fedspan's")
    text, nonce, signature, salt = (header[name] for name in ("header", "nonce", "signature", "salt"))
    if not isinstance(text, str):
        raise ValueError("the header is not text")
    if not isinstance(nonce, bytes) or not isinstance(signature, bytes) or len(nonce) + len(signature) > 512:
        raise ValueError("the header has no proof of who sent it")
    if not isinstance(salt, bytes) or len(salt) != _SALT_BYTES:
        raise ValueError(f"the header has no salt of {_SALT_BYTES} bytes")
    data = body["body"]
    if isinstance(data, Array) and (data.dtype, data.stype, tuple(data.shape)) == ("uint8", _STYPE, (len(data.data),)):
        data = data.data
    if not isinstance(data, bytes):
        raise ValueError("the body is not bytes")
    return Sealed(Envelope(text, _scramble(data, salt)), nonce, signature)


def _scramble(data: bytes, salt: bytes) -> bytes:
    """Encipher or decipher a body: AES in counter mode, whose key is the salt."""
    return Cipher(algorithms.AES(salt), modes.CTR(bytes(16))).encryptor().update(data)


class TooLarge(ObjectPullError):
    """Raised when a message's objects exceed the maximum size."""


def fetch_objects(
    tree: ObjectTree,
    pull: Callable[[str], bytes],
    limit: int,
    known: dict[str, bytes],
    on_size: Callable[[int], None] | None = None,
) -> dict[str, bytes]:
    """Fetch a message's objects; after the one that exceeds the maximum size, no other is fetched.

    Objects that describe others are fetched first: they declare the size of the message.

    Args:
        tree: The ids of the message's objects.
        pull: Fetches one object.
        limit: Maximum size of all objects together, in bytes.
        known: Objects that came along, by id. Those that are fetched are added, so that after an error the next call
            fetches the rest.
        on_size: Called with the size of the message in bytes, if it is declared.

    Returns:
        The objects' contents by id.

    Raises:
        TooLarge: If the objects exceed the maximum size, or declare that they will.
        ObjectPullError: If an object is missing.
    """
    ids, parents = list_tree_ids(tree), list_parent_ids(tree)
    size = sum(len(known[id]) for id in ids if id in known)
    is_declared = False
    for id in [*parents, *(id for id in ids if id not in parents)]:
        if size > limit:
            raise TooLarge(tree.object_id, describe_limit(limit))
        if id in known:
            continue
        if id not in parents and not is_declared:
            is_declared = True
            declared = sum(read_array_bytes(known[parent]) for parent in parents)
            if declared > limit:
                raise TooLarge(tree.object_id, describe_limit(limit))
            if declared and on_size is not None:
                on_size(declared)
        known |= pull_all([id], pull)
        size += len(known[id])
    if size > limit:
        raise TooLarge(tree.object_id, describe_limit(limit))
    return {id: known[id] for id in ids}


def assemble_message(id: str, contents: dict[str, bytes], limit: int) -> Message:
    """Assemble a message.

    Args:
        id: Id of the message's object.
        contents: The message's objects, including nested ones; they are removed, which saves memory.
        limit: Maximum size of the message, in bytes.

    Raises:
        ValueError: If it is not a message or exceeds the maximum size.
    """
    try:
        if count_assembled_bytes(contents) > limit:
            raise ValueError(f"it has {describe_limit(limit)}")
        message = inflate_message(id, contents)
    except ValueError:
        raise
    except Exception as error:  # Flower's code assumes that Flower wrote the objects
        raise ValueError(f"not a message of Flower ({type(error).__name__})") from error
    if message is None:
        raise ValueError("not a message of Flower")
    return message


def count_assembled_bytes(contents: Mapping[str, bytes]) -> int:
    """Return the size of the objects, in bytes, after every array is assembled from its pieces."""
    total = 0
    for content in contents.values():
        total += len(content)
        layout = read_array_layout(content)
        if layout is not None:
            pieces, positions = layout
            sizes = [len(contents[piece]) for piece in pieces]
            total += sum(sizes[position] for position in positions) - sum(sizes)
    return total


def describe_limit(limit: int) -> str:
    """Describe a maximum size in bytes."""
    return f"more than {limit / 2**20:g} MiB, the maximum"
