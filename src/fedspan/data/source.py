"""A split as it was read, and how a message points at one of its examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import datasets

__all__ = ["Source"]


@dataclass(frozen=True)
class Source:
    """A split as it was read.

    Attributes:
        dataset: all its columns, untouched.
        name: what a message calls it: a path, or a hub id with the split.
        header: whether its first row names the columns; examples then count from 2, as a spreadsheet shows them.
        kept: of a source with rows left out, where the rest stood; None: all rows are there.
        files: of a source that was joined from several, their paths and how many rows each has; else none.
    """

    dataset: datasets.Dataset
    name: str
    header: bool = False
    kept: Sequence[int] | None = None
    files: tuple[tuple[str, int], ...] = ()

    def place(self, index: int) -> tuple[str, int]:
        """The file of an example, and its position there (blank lines are not counted)."""
        at = index if self.kept is None else self.kept[index]
        for name, rows in self.files:
            if at < rows:
                return name, at
            at -= rows
        return self.name, at

    def row(self, index: int) -> str:
        """How a message points at one example."""
        name, at = self.place(index)
        return f"row {1 + self.header + at} of {name}"
