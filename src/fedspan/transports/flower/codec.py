"""Conversion between envelopes and Flower's records.

An envelope's body is a safetensors payload (``federation.serialization``), so every dtype arrives bit for bit,
including bfloat16, which Flower's own records lack. In Flower, every record, array and piece of an array is a separate
object with its own requests and database rows; equal objects are stored once. So a body has a separate record, which
the orders of a round share: plain bytes (four objects per message) or, if it is large, an array, which Flower sends in
pieces (six or more objects).
"""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedspan.federation.protocol import Envelope

__all__ = ["SMALL", "from_records", "to_records"]

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
