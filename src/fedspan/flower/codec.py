"""Parcels as Flower's records, and back.

A parcel's body is one array of bytes, which Flower sends in chunks; it is a safetensors payload (``engines.wire``), so
every dtype arrives bit for bit, bfloat16 included, and Flower's own records, which lack it, never see the tensors.
"""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedspan.engines.parcels import Parcel

__all__ = ["from_records", "to_records"]

_HEADER, _BODY = "fedspan.header", "fedspan.body"
_STYPE = "fedspan.bytes"


def to_records(parcel: Parcel) -> RecordDict:
    """A parcel as the content of a Flower message."""
    body = Array(dtype="uint8", shape=(len(parcel.body),), stype=_STYPE, data=parcel.body)
    return RecordDict({_HEADER: ConfigRecord({"header": parcel.header}), _BODY: ArrayRecord({"body": body})})


def from_records(records: RecordDict) -> Parcel:
    """The parcel in a Flower message's content.

    Raises:
        ValueError: if it is not what ``to_records`` makes; nothing else, whatever came.
    """
    if set(records) != {_HEADER, _BODY}:
        raise ValueError(f"records {sorted(records)[:4]}, not {sorted((_HEADER, _BODY))}")
    header, arrays = records[_HEADER], records[_BODY]
    if not isinstance(header, ConfigRecord) or not isinstance(arrays, ArrayRecord):
        raise ValueError("records of other kinds than fedspan's")
    text = header.get("header")
    if set(header) != {"header"} or not isinstance(text, str) or set(arrays) != {"body"}:
        raise ValueError("records hold something else than a header and a body")
    body = arrays["body"]
    if (body.dtype, body.stype, tuple(body.shape)) != ("uint8", _STYPE, (len(body.data),)):
        raise ValueError("the body is no array of bytes")
    return Parcel(text, body.data)
