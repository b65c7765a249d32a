"""A split as it was read, and references to its examples in messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import datasets

__all__ = ["Source"]


@dataclass(frozen=True)
class Source:
    """A split as it was read.

    Attributes:
        dataset: All its columns, unchanged.
        name: Name in messages: a path, or a hub id with the split.
        header: Whether its first row names the columns; examples then count from 2, as in a spreadsheet.
        kept: Original positions of the rows if some were left out; None: all rows are there.
        files: Paths and numbers of rows of the files that the source was joined from; else none.
    """

    dataset: datasets.Dataset
    name: str
    header: bool = False
    kept: Sequence[int] | None = None
    files: tuple[tuple[str, int], ...] = ()

    def place(self, index: int) -> tuple[str, int]:
        """Return the file of an example, and its position there (blank lines are not counted)."""
        at = index if self.kept is None else self.kept[index]
        for name, rows in self.files:
            if at < rows:
                return name, at
            at -= rows
        return self.name, at

    def row(self, index: int) -> str:
        """Return the reference to one example in messages."""
        name, at = self.place(index)
        return f"row {1 + self.header + at} of {name}"
