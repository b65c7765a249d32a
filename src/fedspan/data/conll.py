"""Files in CoNLL form: one word a line with its tag in the last column, and a blank line between sentences."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from fedspan.data.encodings import decode
from fedspan.data.source import ReadTable, read_beginning

TAG = re.compile(r"O|[BIELSU]-\S+")
"""A word's tag: outside (O), or the place of the word in an entity (IOB1, IOB2, IOBES, BILOU) and the entity's type."""
_BARE_TAG = re.compile(r"[BIELSU]")
"""A tag without the type of its entity, which is recognized and refused."""
_DOCUMENT = "-DOCSTART-"
_HEADERS = (
    {"token", "tokens", "word", "words"},
    {"tag", "tags", "label", "labels", "ner", "ner_tag", "ner_tags", "bio", "iob"},
)
"""Names of the first and the last column in a file whose first line names the columns, in lower case."""
_COMMENT = "# "
_SAMPLE = 1 << 14
_LINE_END = re.compile(r"\r\n|\n|\r")
"""Ends of lines; further characters that ``str.splitlines`` knows may be parts of a word."""


def has_sentences(path: Path) -> bool:
    """Check whether a text file begins in CoNLL form: sentences of several columns that end in tags.

    Some tag is that of an entity, unless the file goes on. A file without a blank line is one sentence, if no word has
    a space in it.
    """
    content, is_complete = read_beginning(path, _SAMPLE)
    rows = _list_rows(_split_lines(content.decode(errors="replace"), is_complete=is_complete))
    words = [columns for _, columns in rows if columns is not None]
    if not words or len({len(word) for word in words}) != 1 or len(words[0]) < 2:
        return False
    tags = [word[-1] for word in words]
    if len(words) == len(rows):
        is_table = any(" " in word[0] for word in words)  # of labeled texts
        return not is_table and all(map(TAG.fullmatch, tags)) and any(tag != "O" for tag in tags)
    is_tagged = all(TAG.fullmatch(tag) or _BARE_TAG.fullmatch(tag) for tag in tags)
    return is_tagged and (not is_complete or any(tag != "O" for tag in tags))


def read_sentences(path: Path, encoding: str | None, limit: int | None = None) -> ReadTable:
    """Read a file in CoNLL form as a table with one sentence a row: ``tokens`` and ``tags``, lists of texts.

    The first column holds the word and the last one its tag; tabs separate them, or else spaces. Lines of documents
    (``-DOCSTART-``), comments (``# ``) and a first line that names the columns (``word tag``) are left out.

    Args:
        limit: Number of bytes of the beginning that are read; None: the whole file.

    Raises:
        ValueError: If a line has no tag; the message names the line.
    """
    content, is_complete = read_beginning(path, limit)
    text, name = decode(content, encoding, is_complete=is_complete)
    lines = _split_lines(text, is_complete=is_complete)
    notes = ["sentences in CoNLL form: words in the first column, tags in the last (columns tokens, tags)"]
    if name != "utf-8" and encoding is None:
        notes.append(f"detected encoding {name} (data.encoding)")
    tokens: list[list[str]] = []
    tags: list[list[str]] = []
    is_inside = False
    for number, columns in _list_rows(lines):
        if columns is None:
            is_inside = False
            continue
        word, tag = columns[0], columns[-1]
        if len(columns) < 2 or not word or not TAG.fullmatch(tag):
            line = lines[number - 1].strip()[:80]
            reason = "; a tag names the type of its entity" if _BARE_TAG.fullmatch(tag) else ""
            raise ValueError(f"line {number}: {line!r} is not a word with a tag such as O, B-TYPE or I-TYPE{reason}")
        if not is_inside:
            tokens.append([])
            tags.append([])
            is_inside = True
        tokens[-1].append(word)
        tags[-1].append(tag)
    if not is_complete and is_inside:  # the last sentence may continue beyond the beginning
        tokens.pop()
        tags.pop()
    kind = pa.list_(pa.string())
    table = pa.table({"tokens": pa.array(tokens, kind), "tags": pa.array(tags, kind)})
    return ReadTable(table, notes=tuple(notes), is_complete=is_complete)


def _split_lines(text: str, *, is_complete: bool) -> list[str]:
    """Return the complete lines of a text; the last one of a beginning may be cut, and is left out."""
    lines = _LINE_END.split(text)
    return lines[:-1] if not is_complete or not lines[-1] else lines


def _list_rows(lines: Sequence[str]) -> list[tuple[int, list[str] | None]]:
    """Return the number of each line, from 1 on, and its columns; None ends a sentence.

    Comments and the line that names the columns are left out.
    """
    rows: list[tuple[int, list[str] | None]] = []
    has_begun = False
    width = next((len(_split_columns(line)) for line in lines if not _is_break(line) and line[:2] != _COMMENT), None)
    for number, line in enumerate(lines, start=1):
        columns = None if _is_break(line) else _split_columns(line)
        if not has_begun and columns is not None and _is_header(columns):
            has_begun = True
            continue
        has_begun = has_begun or (columns is not None and line[:2] != _COMMENT)
        # The word "#" may be tagged, too: its line has as many columns as the others.
        if columns is None or line[:2] != _COMMENT or (len(columns) == width and TAG.fullmatch(columns[-1])):
            rows.append((number, columns))
    return rows


def _is_break(line: str) -> bool:
    return not line.strip() or line.startswith(_DOCUMENT)


def _is_header(columns: Sequence[str]) -> bool:
    """Check whether columns of a line are names of columns, the last of which is no tag."""
    ends = (columns[0].lower(), columns[-1].lower())
    return len(columns) > 1 and all(name in names for name, names in zip(ends, _HEADERS, strict=True))


def _split_columns(line: str) -> list[str]:
    """Split a line at tabs, or else at spaces; a no-break space is part of a word, or a word.

    Empty columns at the end, which spreadsheets write, are left out.
    """
    line = line.rstrip("\t")
    columns = line.split("\t") if "\t" in line else re.split(" +", line.strip(" "))
    return [column.strip(" ") or column for column in columns]
