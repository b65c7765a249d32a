"""Shared parts of the readers of files: their result, and the beginning of a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa


@dataclass(frozen=True)
class ReadTable:
    """A file as it was read.

    Attributes:
        table: Columns of the file.
        header: Number of rows above the first example: the column names and titles.
        notes: What was detected, one clause each.
        positions: Positions of the rows in the file if malformed ones were skipped; None: all rows are there.
        skipped: Number of malformed rows.
        is_complete: Whether all of the file was read, and not only its beginning.
    """

    table: pa.Table
    header: int = 0
    notes: tuple[str, ...] = ()
    positions: Sequence[int] | None = None
    skipped: int = 0
    is_complete: bool = True


def read_beginning(path: Path, limit: int | None) -> tuple[bytes, bool]:
    """Return a file's content, or its first `limit` bytes, and whether that is all; ``.gz`` is unpacked.

    Raises:
        OSError: If the file cannot be read or unpacked.
    """
    with pa.input_stream(path) as stream:
        if limit is None:
            return stream.read(), True
        content = stream.read(limit + 1)
    return content[:limit], len(content) <= limit
