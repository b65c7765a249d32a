"""Answers to the requests of nodes for files of base models."""

from __future__ import annotations

import json
import os
from pathlib import Path

from anyio.to_thread import run_sync

from fedspan.transports.flower.bodies import Refused, unpack_parts
from fedspan.transports.flower.wire import BASE_BYTES

__all__ = ["fetch_base"]


async def fetch_base(offers: Path | None, body: bytes) -> tuple[bytes, int, int]:
    """Return bytes of a file of a base model that is offered, their offset, and the file's size.

    Args:
        offers: Folder with the offers of base models; None: none are offered.
        body: A node's request.

    Raises:
        Refused: If it is none, or the file is not offered.
    """
    parts = unpack_parts(body, 3)
    if len(parts) != 3 or not parts[2].isdigit() or len(parts[2]) > 16:
        raise Refused(400, "not a request for a base model")
    if any(len(digest) != 64 or not digest.isalnum() for digest in parts[:2]) or offers is None:
        raise Refused(404, "not a file of a base model that is offered")
    offer, file = (digest.decode("ascii") for digest in parts[:2])
    offset = int(parts[2])
    part = await run_sync(_read_offered, offers, offer, file, offset)
    if part is None:
        raise Refused(404, "not a file of a base model that is offered")
    content, total = part
    return content, offset, total


def _read_offered(offers: Path, offer: str, file: str, offset: int) -> tuple[bytes, int] | None:
    """Return bytes of a file of an offer, and its size; None: there is no such file, or it ends before the offset."""
    for run in sorted(offers.glob(f"{offer}.*.json")):  # each run that offers the model has a file of its own
        try:
            path = json.loads(run.read_bytes())[file]
            with Path(path).open("rb") as source:
                source.seek(offset)
                content = source.read(BASE_BYTES)
                return (content, os.fstat(source.fileno()).st_size) if content else None
        except (OSError, ValueError, KeyError):
            continue
    return None
