"""The wrappers' table of ``fedspan methods``, separate from the methods' table and readable without torch.

``table.json`` is written by ``python -m fedspan.wrappers.describe``; a test fails if it differs from the registry.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from fedspan.methods.describe import Option, list_options, read_table, read_title, write_table

_HIDDEN = frozenset({"inner", "seed"})


@dataclasses.dataclass(frozen=True)
class WrapperRow:
    """A registered wrapper.

    Args:
        key: Key in the list ``method.wrappers`` of a config.
        name: Name, as the paper spells it.
        cls: Name of the class in ``fedspan.wrappers``.
        idea: Summary in one line.
        paper: Title, venue and arXiv id.
        kind: Effect on a method; a method cannot have two wrappers of one kind.
        options: Options besides the name.
    """

    key: str
    name: str
    cls: str
    idea: str
    paper: str
    kind: str
    options: tuple[Option, ...]


def list_wrappers() -> tuple[WrapperRow, ...]:
    """List every registered wrapper, sorted by key. No wrapper is imported, so this takes milliseconds.

    Returns:
        A row for each wrapper, with its key.

    Examples:
        >>> [row.key for row in fedspan.list_wrappers()]
    """
    return read_table("fedspan.wrappers", WrapperRow)


def describe() -> list[dict[str, Any]]:
    """Build the table as plain values from the registry."""
    from fedspan.wrappers.registry import WRAPPERS  # imports torch, which reading the table does not need

    rows: list[dict[str, Any]] = []
    for key, cls in sorted(WRAPPERS.items()):
        name, idea = read_title(cls)
        options = tuple(list_options(cls, _HIDDEN))
        rows.append(dataclasses.asdict(WrapperRow(key, name, cls.__name__, idea, cls.paper, cls.kind, options)))
    return json.loads(json.dumps(rows))


if __name__ == "__main__":
    write_table(__file__, describe())
