"""What ``fedspan methods`` shows: the registry as a table that can be read without importing torch.

``table.json`` is written by ``python -m fedspan.methods.describe``; a test fails when it differs from the registry.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

__all__ = ["MethodRow", "Option", "describe", "list_methods", "options_of", "title_of"]

_TABLE = "table.json"


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of a method, as ``method.<name>`` in a config.

    Args:
        name: of the option.
        type: of its values.
        default: what it is when left out.
        help: what it does.
    """

    name: str
    type: str
    default: Any
    help: str


@dataclasses.dataclass(frozen=True)
class MethodRow:
    """A registered method and what it claims of itself.

    Args:
        key: ``method.name`` in a config.
        name: as the paper spells it.
        cls: the class, in ``fedspan.methods``.
        idea: one line.
        paper: title, venue and arXiv id.
        exact: the aggregated weight equals the weighted mean of the clients' weights, to rounding.
        personal: every client ends with a model of its own.
        heterogeneous_ranks: clients may have different ranks.
        reduction: ``sum`` if a weighted mean of the replies is enough, else ``stack``.
        extras: what becomes of the head by default: average, local or frozen.
        options: beside the name.
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
    """Every registered method, sorted by key. Imports no method, so it takes milliseconds."""
    rows = json.loads(files("fedspan.methods").joinpath(_TABLE).read_text(encoding="utf-8"))
    return tuple(MethodRow(options=tuple(Option(**option) for option in row.pop("options")), **row) for row in rows)


def describe() -> list[dict[str, Any]]:
    """The table as plain values, made from the registry."""
    from fedspan.methods.registry import METHODS  # imports torch, which reading the table does without

    rows: list[dict[str, Any]] = []
    for key, cls in sorted(METHODS.items()):
        claims = cls.claims
        name, idea = title_of(cls)
        row = MethodRow(
            key=key,
            name=name,
            cls=cls.__name__,
            idea=idea,
            paper=claims.paper,
            exact=claims.exact,
            personal=claims.personal,
            heterogeneous_ranks=claims.heterogeneous_ranks,
            reduction=claims.reduction,
            extras=claims.extras,
            options=tuple(options_of(cls, frozenset({"spec", "seed"}))),
        )
        rows.append(dataclasses.asdict(row))
    return json.loads(json.dumps(rows))


def title_of(cls: type[Any]) -> tuple[str, str]:
    """Name and idea, which the first line of a class's module gives."""
    name, _, idea = (inspect.getdoc(inspect.getmodule(cls)) or "").split("\n\n")[0].partition(": ")
    return name, " ".join(idea.split())


def options_of(cls: type[Any], hidden: frozenset[str]) -> list[Option]:
    """The fields of a class but for the hidden ones, with what docstrings of the class and its bases say of them."""
    said: dict[str, str] = {}
    for ancestor in reversed(cls.__mro__):
        said |= _arguments(ancestor.__doc__ or "")
    return [
        Option(field.name, str(field.type), field.default, said.get(field.name, ""))
        for field in dataclasses.fields(cls)
        if field.name not in hidden
    ]


def _arguments(docstring: str) -> Mapping[str, str]:
    """The ``Args`` section of a docstring, by name."""
    section = inspect.cleandoc(docstring).partition("\nArgs:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def main() -> None:
    """Write the table."""
    path = Path(__file__).with_name(_TABLE)
    path.write_text(json.dumps(describe(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
