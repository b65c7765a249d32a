"""Several files as one: braces in their paths become columns (``clinics/{hospital}/train.csv``)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedspan.data.names import describe_partial_column
from fedspan.data.source import Source
from fedspan.errors import FedspanError

if TYPE_CHECKING:
    import datasets


def read_multiple(user_path: str, option: str, read: Callable[[Path], Source]) -> Source:
    """Read all files that match a path with places, concatenated, with a column for each place."""
    matches = match_paths(user_path, option)
    if not matches:
        problem = f"no file matches {user_path!r}, where each pair of braces stands for a part of a name"
        raise FedspanError(option, user_path, problem=problem)
    sources = {path: read(path) for path in matches}
    if len({bool(source.header) for source in sources.values()}) > 1:
        kinds = sorted({"".join(path.suffixes) for path in matches})
        raise FedspanError(option, user_path, problem=f"the files have several formats: {', '.join(kinds)}")
    try:
        dataset, notes = _concatenate({path: source.dataset for path, source in sources.items()}, matches)
    except ValueError as error:
        problem = f"the files do not match: {str(error).splitlines()[0][:300]}"
        raise FedspanError(option, user_path, problem=problem) from error
    files = tuple((source.name, len(source.dataset) + source.skipped, source.header) for source in sources.values())
    return Source(
        dataset,
        user_path,
        max(source.header for source in sources.values()),
        positions=_align_positions(list(sources.values())),
        files=files,
        notes=(*dict.fromkeys(note for source in sources.values() for note in source.notes), *notes),
        skipped=sum(source.skipped for source in sources.values()),
        is_complete=all(source.is_complete for source in sources.values()),
    )


def _align_positions(sources: Sequence[Source]) -> list[int] | None:
    """Return the positions of the rows among those of all files; None if no row was left out."""
    if not any(source.skipped for source in sources):
        return None
    positions: list[int] = []
    start = 0
    for source in sources:
        rows = range(len(source.dataset)) if source.positions is None else source.positions
        positions += [start + position for position in rows]
        start += len(source.dataset) + source.skipped
    return positions


def _concatenate(
    tables: Mapping[Path, datasets.Dataset], places: Mapping[Path, Mapping[str, str]]
) -> tuple[datasets.Dataset, list[str]]:
    """Concatenate the columns that all tables have, and describe the others; ValueError: kinds or names clash."""
    import datasets

    lacking: dict[str, Path] = {}
    for path, table in tables.items():
        for name in {name for other in tables.values() for name in other.column_names} - set(table.column_names):
            lacking.setdefault(name, path)
    datasets_by_file: list[datasets.Dataset] = []
    for path, table in tables.items():
        table = table.remove_columns([name for name in table.column_names if name in lacking])
        for column, text in places[path].items():
            if column in table.column_names:
                raise ValueError(f"{path} has a column {column!r} already")
            table = table.add_column(column, [text] * len(table))
        datasets_by_file.append(table)
    notes = [describe_partial_column(name, str(lacking[name])) for name in sorted(lacking)]
    return datasets.concatenate_datasets(datasets_by_file), notes


_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


def list_placeholders(user_path: str) -> list[str]:
    """Return the names in a path's braces, in order."""
    return list(dict.fromkeys(_PLACEHOLDER.findall(user_path)))


def has_placeholders(user_path: str) -> bool:
    """Check whether a path has braces that stand for names, and is not itself an existing path."""
    return bool(list_placeholders(user_path)) and not os.path.exists(os.path.expanduser(user_path))


def has_files(user_path: str) -> bool:
    """Check whether a path has braces, and the folder before them exists."""
    return has_placeholders(user_path) and os.path.isdir(os.path.dirname(user_path.partition("{")[0]))


def match_paths(user_path: str, option: str) -> dict[Path, dict[str, str]]:
    """Return the files that match a path with places, sorted, each with the texts of its places.

    A place is any text without a separator; one that occurs twice is the same text twice. Hidden files are left out.

    Args:
        user_path: Path with places, such as ``clinics/{hospital}/train.csv``.

    Raises:
        FedspanError: If a folder in the path cannot be read: a data owner would be missing without notice.
    """
    matches: list[tuple[Path, dict[str, str]]] = [(Path(), {})]
    for part in Path(os.path.expanduser(user_path)).parts:
        if _PLACEHOLDER.search(part) is None:
            matches = [(path / part, values) for path, values in matches]
            continue
        pattern = _compile_pattern(part)
        matches = [
            (path / name, values | match.groupdict())
            for path, values in matches
            for name in _list_names(path, user_path, option)
            if (match := pattern.fullmatch(name)) is not None
            and all(values.get(placeholder, text) == text for placeholder, text in match.groupdict().items())
        ]
    for path, _ in matches:
        _require_readable(path.parent, user_path, option)
    return {path: values for path, values in matches if os.path.isfile(path)}


def _compile_pattern(part: str) -> re.Pattern[str]:
    """Return the pattern of a name; its places are groups."""
    pieces = _PLACEHOLDER.split(part)  # text, place, text, place, text
    body, seen = re.escape(pieces[0]), set[str]()
    for placeholder, text in zip(pieces[1::2], pieces[2::2], strict=True):
        body += (f"(?P={placeholder})" if placeholder in seen else f"(?P<{placeholder}>.+?)") + re.escape(text)
        seen.add(placeholder)
    return re.compile(body)


def _list_names(folder: Path, user_path: str, option: str) -> list[str]:
    if not os.path.isdir(folder):
        return []
    _require_readable(folder, user_path, option)
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))


def _require_readable(folder: Path, user_path: str, option: str) -> None:
    if os.path.isdir(folder) and not os.access(folder, os.R_OK | os.X_OK):
        raise FedspanError(option, user_path, problem=f"the folder {folder} cannot be read")
