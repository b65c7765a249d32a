"""A split as it was read, and references to its examples in messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True)
class Source:
    """A split as it was read."""

    dataset: datasets.Dataset
    """All its columns, unchanged."""
    name: str
    """Name in messages: a path, or a hub id with the split."""
    header: int = 0
    """Number of rows above the first example, the column names and titles, which count as in a spreadsheet."""
    positions: Sequence[int] | None = None
    """Original positions of the rows if some were left out; None: all rows are there."""
    files: tuple[tuple[str, int, int], ...] = ()
    """The files that the source was joined from: path, number of rows, and number of rows above them; else none."""
    notes: tuple[str, ...] = ()
    """What was detected in the file, one clause each."""
    skipped: int = 0
    """Number of malformed rows that were left out in reading."""
    is_complete: bool = True
    """Whether all rows were read, and not only those at the beginning."""

    def place(self, index: int) -> tuple[str, int]:
        """Return the file of an example, and the number of its row there, from 1 (blank lines are not counted)."""
        position = index if self.positions is None else self.positions[index]
        for name, rows, header in self.files:
            if position < rows:
                return name, 1 + header + position
            position -= rows
        return self.name, 1 + self.header + position

    def row(self, index: int) -> str:
        """Return the reference to one example in messages."""
        name, row = self.place(index)
        return f"row {row} of {name}"

    def select(self, rows: Sequence[int]) -> Source:
        """Return some of the rows, which keep their positions in messages."""
        positions = rows if self.positions is None else [self.positions[row] for row in rows]
        return replace(self, dataset=self.dataset.select(rows), positions=positions)


@dataclass(frozen=True)
class ReadTable:
    """A file as it was read."""

    table: pa.Table
    header: int = 0
    """Number of rows above the first example: the column names and titles."""
    notes: tuple[str, ...] = ()
    """What was detected, one clause each."""
    positions: Sequence[int] | None = None
    """Positions of the rows in the file if malformed ones were skipped; None: all rows are there."""
    skipped: int = 0
    is_complete: bool = True
    """Whether all of the file was read, and not only its beginning."""


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
