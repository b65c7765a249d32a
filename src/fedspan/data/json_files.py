"""JSON and JSON lines as tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from fedspan.data.encodings import decode
from fedspan.data.source import ReadTable, read_beginning


def read_json(path: Path, kind: str, encoding: str | None, limit: int | None = None) -> ReadTable:
    """Read a ``.json`` file (a list of objects, or one that is the only list in an object) or a ``.jsonl`` file.

    A ``.json`` file with one object a line is read as such.

    Args:
        limit: Number of bytes of the beginning that are read; None: the whole file.

    Raises:
        ValueError: If the file is malformed; the message names the row.
    """
    content, is_complete = read_beginning(path, limit)
    text, name = decode(content, encoding, is_complete=is_complete)
    notes = () if name == "utf-8" or encoding is not None else (f"detected encoding {name} (data.encoding)",)
    if kind == "json" and text.lstrip()[:1] == "{" and _is_lines(text):
        kind = "jsonl"
    if kind == "jsonl":
        lines = text.split("\n")  # not splitlines: JSON strings may contain other literal line separators
        records: list[Any] = _parse_lines(lines if is_complete else lines[:-1])
    else:
        records = _parse_list(text) if is_complete else _parse_beginning(text)
    invalid_row = next((row for row, record in enumerate(records, start=1) if not isinstance(record, dict)), None)
    if invalid_row is not None:
        raise ValueError(f"row {invalid_row}: not an object with the columns as its keys")
    return ReadTable(make_table(records), notes=notes, is_complete=is_complete)


def _is_lines(text: str) -> bool:
    """Check whether the first line of a text is an object on its own, and is not the only line."""
    first, _, rest = text.lstrip().partition("\n")
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return False
    return rest.lstrip()[:1] == "{"


def _parse_lines(lines: Iterable[str]) -> list[Any]:
    records: list[Any] = []
    for line in filter(str.strip, lines):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"row {len(records) + 1}: {error}") from error
    return records


def _parse_list(text: str) -> list[Any]:
    # The standard json module reports the place of a mistake; pandas and Arrow convert date-like texts to dates.
    content = json.loads(text)
    if isinstance(content, dict):
        lists = [
            value for value in content.values() if isinstance(value, list) and value and isinstance(value[0], dict)
        ]
        content = lists[0] if len(lists) == 1 else content
    if not isinstance(content, list):
        raise ValueError("not a list of objects (one object a line goes into a .jsonl file)")
    return content


def _parse_beginning(text: str) -> list[Any]:
    """Return the complete objects at the beginning of a list that is cut off."""
    decoder, records = json.JSONDecoder(), list[Any]()
    position = text.find("[") + 1
    while (start := text.find("{", position)) >= 0:
        try:
            record, position = decoder.raw_decode(text, start)
        except ValueError:
            break
        records.append(record)
    return records


def make_table(records: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Return records as a table; a column of mixed types becomes text, and NaN or a key that a record lacks null."""
    records = list(records)
    columns: dict[str, pa.Array] = {}
    for name in dict.fromkeys(key for record in records for key in record):
        values = [convert_nan(record.get(name)) for record in records]
        try:
            columns[str(name)] = pa.array(values)
        # A column that mixes types, such as the labels 1 and "other", or contains integers of more than 64 bits.
        except (pa.ArrowException, OverflowError):
            columns[str(name)] = pa.array([None if value is None else str(value) for value in values])
    return pa.table(columns)


def convert_nan(value: Any) -> Any:
    """Return None for NaN, which is pandas' missing value in columns of text, too."""
    return None if isinstance(value, float) and value != value else value
