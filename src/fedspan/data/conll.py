"""Files in CoNLL form: one word a line with its tag in the last column, and a blank line between sentences."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa

from fedspan.data.encodings import decode
from fedspan.data.reading import ReadTable, read_beginning

__all__ = ["TAG", "has_sentences", "read_sentences"]

TAG = re.compile(r"O|[BIELSU]-\S+")
"""A word's tag: outside (O), or the place of the word in an entity (IOB1, IOB2, IOBES, BILOU) and the entity's type."""
_DOCUMENT = "-DOCSTART-"
_SAMPLE = 1 << 14


def has_sentences(path: Path) -> bool:
    """Check whether a text file begins in CoNLL form: sentences of several columns that end in tags, some of entities.

    Args:
        path: The file; ``.gz`` is unpacked.

    Raises:
        OSError: If the file cannot be read.
    """
    content, whole = read_beginning(path, _SAMPLE)
    text = content.decode(errors="replace")
    lines = text.splitlines() if whole else text.splitlines()[:-1]
    words = [line.split() for line in lines if line.strip() and not line.startswith(_DOCUMENT)]
    if not words or len(words) == len(lines) or len({len(word) for word in words}) != 1 or len(words[0]) < 2:
        return False
    tags = [word[-1] for word in words]
    return all(map(TAG.fullmatch, tags)) and any(tag != "O" for tag in tags)


def read_sentences(path: Path, encoding: str | None, limit: int | None = None) -> ReadTable:
    """Read a file in CoNLL form as a table with one sentence a row: ``tokens`` and ``tags``, lists of texts.

    The first column holds the word and the last one its tag. Lines of documents (``-DOCSTART-``) are left out.

    Args:
        path: The file; ``.gz`` is unpacked.
        encoding: The file's encoding; None: detected.
        limit: Number of bytes of the beginning that are read; None: the whole file.

    Raises:
        ValueError: If a line has no tag; the message names the line.
        OSError: If the file cannot be read.
    """
    content, whole = read_beginning(path, limit)
    text, name = decode(content, encoding, whole=whole)
    lines = text.split("\n") if whole else text.split("\n")[: text.count("\n")]
    notes = ["sentences in CoNLL form: words in the first column, tags in the last (columns tokens, tags)"]
    if name != "utf-8" and encoding is None:
        notes.append(f"detected encoding {name} (data.encoding)")
    tokens: list[list[str]] = []
    tags: list[list[str]] = []
    inside = False
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith(_DOCUMENT):
            inside = False
            continue
        parts = line.split("\t") if "\t" in line else line.split()
        word, tag = parts[0].strip(), parts[-1].strip()
        if len(parts) < 2 or not word or not TAG.fullmatch(tag):
            raise ValueError(
                f"line {number}: {line.strip()[:80]!r} is not a word with a tag such as O, B-TYPE or I-TYPE"
            )
        if not inside:
            tokens.append([])
            tags.append([])
            inside = True
        tokens[-1].append(word)
        tags[-1].append(tag)
    if not whole and inside:  # the last sentence may go on beyond the beginning
        tokens.pop()
        tags.pop()
    kind = pa.list_(pa.string())
    table = pa.table({"tokens": pa.array(tokens, kind), "tags": pa.array(tags, kind)})
    return ReadTable(table, notes=tuple(notes), whole=whole)
