"""A split as it was read, and references to its examples in messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import datasets


__all__ = ["Source"]


@dataclass(frozen=True)
class Source:
    """A split as it was read.

    Attributes:
        dataset: All its columns, unchanged.
        name: Name in messages: a path, or a hub id with the split.
        header: Whether its first row names the columns; examples then count from 2, as in a spreadsheet.
        positions: Original positions of the rows if some were left out; None: all rows are there.
        files: Paths and numbers of rows of the files that the source was joined from; else none.
        notes: What was detected in the file, one clause each.
        skipped: Number of malformed rows that were left out in reading.
        is_complete: Whether all rows were read, and not only those at the beginning.
    """

    dataset: datasets.Dataset
    name: str
    header: bool = False
    positions: Sequence[int] | None = None
    files: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()
    skipped: int = 0
    is_complete: bool = True

    def place(self, index: int) -> tuple[str, int]:
        """Return the file of an example, and its position there (blank lines are not counted)."""
        position = index if self.positions is None else self.positions[index]
        for name, rows in self.files:
            if position < rows:
                return name, position
            position -= rows
        return self.name, position

    def row(self, index: int) -> str:
        """Return the reference to one example in messages."""
        name, position = self.place(index)
        return f"row {1 + self.header + position} of {name}"

    def select(self, rows: Sequence[int]) -> Source:
        """Return some of the rows, which keep their positions in messages."""
        positions = rows if self.positions is None else [self.positions[row] for row in rows]
        return replace(self, dataset=self.dataset.select(rows), positions=positions)
