"""Several files as one: what stands for braces in their paths becomes a column (``clinics/{hospital}/train.csv``)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

__all__ = ["has_places", "joined", "matching"]

_PLACE = re.compile(r"\{([A-Za-z_]\w*)\}")


def has_places(where: str) -> bool:
    """Whether a path has braces that stand for names, and is none itself."""
    return _PLACE.search(where) is not None and not os.path.exists(os.path.expanduser(where))


def matching(where: str) -> dict[Path, dict[str, str]]:
    """The files that a path with places stands for, sorted, each with what its places stand for.

    A place is any text without a separator; one that occurs twice is the same text twice. Hidden files are left out.

    Args:
        where: such as ``clinics/{hospital}/train.csv``.
    """
    found: list[tuple[Path, dict[str, str]]] = [(Path(), {})]
    for part in Path(os.path.expanduser(where)).parts:
        if _PLACE.search(part) is None:
            found = [(path / part, values) for path, values in found]
            continue
        pattern = _pattern(part)
        found = [
            (path / name, values | match.groupdict())
            for path, values in found
            for name in _names(path)
            if (match := pattern.fullmatch(name)) is not None
            and all(values.get(place, text) == text for place, text in match.groupdict().items())
        ]
    return {path: values for path, values in found if path.is_file()}


def _pattern(part: str) -> re.Pattern[str]:
    """What a name has to look like; its places are groups."""
    pieces = _PLACE.split(part)  # text, place, text, place, text
    body, seen = re.escape(pieces[0]), set[str]()
    for place, text in zip(pieces[1::2], pieces[2::2], strict=True):
        body += (f"(?P={place})" if place in seen else f"(?P<{place}>.+?)") + re.escape(text)
        seen.add(place)
    return re.compile(body)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError:
        return []


def joined(tables: Mapping[Path, pa.Table], places: Mapping[Path, Mapping[str, str]]) -> pa.Table:
    """Tables one below the other, with a column for each place.

    Args:
        tables: by file.
        places: what the places of each file stand for.

    Raises:
        ValueError: the files' columns differ, or a place is called like one.
        pyarrow.ArrowException: a column has types that do not go together.
    """
    first = next(iter(tables))
    whole: list[pa.Table] = []
    for path, table in tables.items():
        if differ := set(table.column_names) ^ set(tables[first].column_names):
            raise ValueError(f"{sorted(differ)[0]!r} is not in both {first} and {path}")
        for place, text in places[path].items():
            if place in table.column_names:
                raise ValueError(f"{path} has a column {place!r} already")
            table = table.append_column(place, pa.array([text] * len(table), pa.string()))
        whole.append(table)
    return pa.concat_tables(whole, promote_options="permissive")
