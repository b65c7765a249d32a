"""Parcels as Flower's records, and back.

A parcel's body is bytes, a safetensors payload (``engines.wire``), so every dtype arrives bit for bit, bfloat16
included, and Flower's own records, which lack it, never see the tensors. Every record, array and piece of an array is
an object of its own to Flower, with requests and rows of its database; equal ones are kept once. So a body has a record
of its own, which the orders of a round share: of plain bytes (four objects a message) or, if it is large, of an array,
which Flower sends in pieces (six or more).
"""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedspan.federation.protocol import Envelope

__all__ = ["SMALL", "from_records", "to_records"]

SMALL = 4 * 2**20
"""Bytes of a body that goes as one piece: what a lost connection costs to send again."""
_HEADER, _BODY = "fedspan.header", "fedspan.body"
_STYPE = "fedspan.bytes"


def to_records(envelope: Envelope) -> RecordDict:
    """A parcel as the content of a Flower message."""
    header, data = ConfigRecord({"header": envelope.header}), envelope.body
    if len(data) <= SMALL:
        return RecordDict({_HEADER: header, _BODY: ConfigRecord({"body": data})})
    body = Array(dtype="uint8", shape=(len(data),), stype=_STYPE, data=data)
    return RecordDict({_HEADER: header, _BODY: ArrayRecord({"body": body})})


def from_records(records: RecordDict) -> Envelope:
    """The parcel in a Flower message's content.

    Raises:
        ValueError: if it is not what ``to_records`` makes; nothing else, whatever came.
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
