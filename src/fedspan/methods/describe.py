"""The table of ``fedspan methods``: the registry in a form that can be read without importing torch.

``table.json`` is written by ``python -m fedspan.methods.describe``; a test fails if it differs from the registry.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

_TABLE = "table.json"
_CLAIMS = ("paper", "exact", "personal", "heterogeneous_ranks", "reduction", "extras")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of a method, as ``method.<name>`` in a config."""

    name: str
    type: str
    default: Any
    help: str


@dataclasses.dataclass(frozen=True)
class MethodRow:
    """A registered method and its claims.

    Args:
        key: ``method.name`` in a config.
        name: Name, as the paper spells it.
        cls: Name of the class in ``fedspan.methods``.
        idea: Summary in one line.
        paper: Title, venue and arXiv id.
        exact: Whether the aggregated weight equals the weighted mean of the clients' weights, to rounding.
        personal: Whether every client ends with its own model.
        heterogeneous_ranks: Whether clients may have different ranks.
        reduction: ``sum`` if a weighted mean of the replies suffices, else ``stack``.
        extras: Default treatment of the head: average, local or frozen.
        options: Options besides the name.
    """

    key: str
    name: str
    cls: str
    idea: str
    paper: str
    exact: bool
    personal: bool
    heterogeneous_ranks: bool
    reduction: str
    extras: str
    options: tuple[Option, ...]


def list_methods() -> tuple[MethodRow, ...]:
    """List every registered method, sorted by key. No method is imported, so this takes milliseconds.

    Returns:
        A row for each method: its key, its paper and its claims.

    Examples:
        >>> [row.key for row in fedspan.list_methods()]
    """
    return read_table("fedspan.methods", MethodRow)


def read_table(package: str, row_class: Callable[..., R]) -> tuple[R, ...]:
    """Return the rows of the table in a package."""
    rows = json.loads(files(package).joinpath(_TABLE).read_text(encoding="utf-8"))
    return tuple(row_class(options=tuple(Option(**option) for option in row.pop("options")), **row) for row in rows)


def describe() -> list[dict[str, Any]]:
    """Build the table as plain values from the registry."""
    from fedspan.methods.registry import METHODS  # imports torch, which reading the table does not need

    rows: list[dict[str, Any]] = []
    for key, cls in sorted(METHODS.items()):
        claims = cls.claims
        name, idea = read_title(cls)
        row = MethodRow(
            key=key,
            name=name,
            cls=cls.__name__,
            idea=idea,
            **{name: getattr(claims, name) for name in _CLAIMS},
            options=tuple(list_options(cls, frozenset({"spec", "seed"}))),
        )
        rows.append(dataclasses.asdict(row))
    return json.loads(json.dumps(rows))


def read_title(cls: type[Any]) -> tuple[str, str]:
    """Return name and idea from the first line of the docstring of a class's module."""
    name, _, idea = (inspect.getdoc(inspect.getmodule(cls)) or "").split("\n\n")[0].partition(": ")
    return name, " ".join(idea.split())


def list_options(cls: type[Any], hidden: frozenset[str]) -> list[Option]:
    """List the fields of a class except the hidden ones, with help from the docstrings of the class and its bases."""
    descriptions: dict[str, str] = {}
    for ancestor in reversed(cls.__mro__):
        descriptions |= _parse_arguments(ancestor.__doc__ or "")
    return [
        Option(field.name, str(field.type), field.default, descriptions.get(field.name, ""))
        for field in dataclasses.fields(cls)
        if field.name not in hidden
    ]


def _parse_arguments(docstring: str) -> Mapping[str, str]:
    section = inspect.cleandoc(docstring).partition("\nArgs:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def write_table(module: str, rows: list[dict[str, Any]]) -> None:
    """Write the table beside the file of a module."""
    path = Path(module).with_name(_TABLE)
    path.write_text(json.dumps(rows, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    write_table(__file__, describe())
