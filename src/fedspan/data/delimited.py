"""Delimited files (csv, tsv, txt) in any dialect as tables of text."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.csv

from fedspan.data.config import DataConfig
from fedspan.data.dialects import DELIMITERS, Dialect, describe_missing_header, describe_titles, detect_dialect
from fedspan.data.encodings import convert_to_utf8
from fedspan.data.source import ReadTable, read_beginning

_SAMPLE = 1 << 18
"""Number of bytes that the detection of a dialect examines."""


def read_delimited(path: Path, kind: str, config: DataConfig, limit: int | None = None) -> ReadTable:
    """Read a delimited file; every value is text.

    Args:
        kind: The suffix without a dot, ``csv``, ``tsv`` or ``txt``.
        limit: Number of bytes of the beginning that are read; None: the whole file.

    Raises:
        ValueError: If the file does not match the requested or detected dialect or encoding.
    """
    content, is_complete = read_beginning(path, limit)
    content, encoding = convert_to_utf8(content, config.encoding, is_complete=is_complete)
    if not is_complete:
        content = content[: content.rfind(b"\n") + 1]
    dialect = _detect_file_dialect(content, kind, config)
    table, invalid_lines = _parse(content, dialect, skip_invalid=config.invalid == "skip" or not is_complete)
    if invalid_lines and not len(table):  # no row matches the header: the error of the first one describes the problem
        _parse(content, dialect, skip_invalid=False)
    names = [name.strip() or f"column_{number}" for number, name in enumerate(table.column_names, start=1)]
    table = table.rename_columns(names)
    notes = _describe_format(encoding, kind, dialect, config)
    # A sample that ends inside a quoted text ends in one malformed row, which is not an error in the file.
    positions, left_out = None, set(invalid_lines)
    if left_out and is_complete:
        positions = [position for position in range(len(table) + len(left_out)) if position not in left_out]
    skipped = len(invalid_lines) if is_complete else 0
    return ReadTable(table, dialect.header + len(dialect.titles), tuple(notes), positions, skipped, is_complete)


def read_delimited_names(path: Path, kind: str) -> list[str]:
    """Return the names in a delimited file's first row, or its first example if it has no header."""
    content, is_complete = read_beginning(path, _SAMPLE)
    content, _ = convert_to_utf8(content, is_complete=is_complete)
    dialect = detect_dialect(_take_sample(content), tabs=kind == "tsv", header=True)
    return [name.strip() for name in dialect.names]


def _detect_file_dialect(content: bytes, kind: str, config: DataConfig) -> Dialect:
    roles = ("text", "text_pair", "label", "answer", "image", "messages", "group")
    requested = {getattr(config, role) for role in roles if role in config.model_fields_set} - {None}
    return detect_dialect(
        _take_sample(content),
        tabs=kind == "tsv",
        delimiter=config.delimiter,
        quoting=config.quoting,
        header=config.header,
        names=config.columns,
        requested=requested,
    )


def _take_sample(content: bytes) -> str:
    head = content[:_SAMPLE]
    if len(head) < len(content):
        head = head[: head.rfind(b"\n") + 1] or head
    return head.decode(errors="ignore")


def _parse(content: bytes, dialect: Dialect, *, skip_invalid: bool) -> tuple[pa.Table, list[int]]:
    """Parse a file in UTF-8; return its rows and the positions of malformed rows, if those are skipped."""
    invalid_lines: list[int] = []

    def on_invalid(row: pyarrow.csv.InvalidRow) -> str:
        if not skip_invalid:
            return "error"
        invalid_lines.append(row.number - 1 - dialect.header)
        return "skip"

    parse = pyarrow.csv.ParseOptions(
        delimiter=dialect.delimiter,
        quote_char=dialect.quote or False,
        double_quote=dialect.quote is not None,
        newlines_in_values=dialect.quote is not None,
        invalid_row_handler=on_invalid,
    )
    # One thread; otherwise a malformed row is reported without its number.
    names = None if dialect.header else list(dialect.names)
    read_options = pyarrow.csv.ReadOptions(column_names=names, use_threads=False)
    # From memory, since the content is read twice: Arrow's read-ahead thread outlives the first reader, and on a file
    # reopened under the same descriptor it took whole blocks of rows away from the second.
    buffer = pa.py_buffer(content).slice(dialect.skip)
    if names is None:
        with pyarrow.csv.open_csv(pa.BufferReader(buffer), read_options, parse) as reader:
            names = reader.schema.names
        invalid_lines.clear()
    # Everything as text: a type guessed from the content would turn the label 01 into 1 and the text NA into a null.
    convert = pyarrow.csv.ConvertOptions(column_types={name: pa.string() for name in names})
    return pyarrow.csv.read_csv(pa.BufferReader(buffer), read_options, parse, convert), invalid_lines


def _describe_format(encoding: str, kind: str, dialect: Dialect, config: DataConfig) -> list[str]:
    """Describe the detected options that differ from the convention of the file's suffix."""
    notes: list[str] = []
    detected = []
    if config.encoding is None and encoding != "utf-8":
        detected.append(f"encoding {encoding} (data.encoding)")
    if config.delimiter is None and dialect.delimiter != ("\t" if kind == "tsv" else ","):
        detected.append(f"{DELIMITERS.get(dialect.delimiter, dialect.delimiter)} between columns (data.delimiter)")
    if config.quoting is None and dialect.quoting != ("none" if kind == "tsv" else "double"):
        detected.append(f"quoting {dialect.quoting} (data.quoting)")
    if detected:
        notes.append(f"detected {', '.join(detected)}")
    if dialect.titles:
        notes.append(describe_titles(dialect.titles))
    if config.header is None and config.columns is None and not dialect.header:
        notes.append(describe_missing_header(dialect.names))
    return notes
