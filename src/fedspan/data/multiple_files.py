"""Several files as one: braces in their paths become columns (``clinics/{hospital}/train.csv``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedspan.data.names import describe_partial_column
from fedspan.data.path_patterns import match_paths
from fedspan.data.source import Source
from fedspan.errors import FedspanError

if TYPE_CHECKING:
    import datasets


def read_multiple(user_path: str, option: str, read: Callable[[Path], Source]) -> Source:
    """Read all files that match a path with places, concatenated, with a column for each place.

    Args:
        user_path: The path.
        option: The user's name of the option.
        read: Function that reads one of the files.

    Raises:
        FedspanError: If there are no files, one cannot be read, or they do not go together.
    """
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
    """Concatenate the columns that all tables have, and describe the others.

    Raises:
        ValueError: If columns differ in kind or classes, or a place is named like one.
    """
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
