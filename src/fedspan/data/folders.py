"""Folders of files by class: their layout, and text files in them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from fedspan.data.encodings import decode_all
from fedspan.data.source import ReadTable
from fedspan.errors import escape_controls

TEXTS = (".txt",)
_PARTS = {"train", "test", "val", "valid", "validation"}
_ABOUT = frozenset({"changelog", "citation", "copying", "licence", "license", "readme"})
"""Names, without suffixes, of files about a collection."""


def infer_classes(paths: Sequence[Sequence[str]], name: str, suffixes: Collection[str]) -> dict[str, list[str]]:
    """Return the classes of files, and their domains if there are any, from the folders that they are in.

    Raises:
        ValueError: If there are none, or they are laid out differently.
    """
    if not paths:
        raise ValueError(f"{name} holds none ({', '.join(suffixes)})")
    depths = {len(parts) for parts in paths}
    if depths not in ({2}, {3}):
        by_depth = ["/".join(next(parts for parts in paths if len(parts) == depth)) for depth in sorted(depths)]
        raise ValueError(f"expected class/file or domain/class/file for all files, got {' and '.join(by_depth[:3])}")
    top_folders = {parts[0] for parts in paths}
    if depths == {3} and top_folders <= _PARTS:
        parts = ", ".join(sorted(top_folders))
        raise ValueError(f"it holds the parts {parts}; name the folder of one (unpack an archive before)")
    label = [parts[-2] for parts in paths]
    return {"label": label} if depths == {2} else {"label": label, "domain": [parts[0] for parts in paths]}


def is_example(parts: Sequence[str]) -> bool:
    """Check whether a file may be an example by its path: it is not hidden, of macOS, a README or a license."""
    if any(part.startswith(".") or part == "__MACOSX" for part in parts):
        return False
    return parts[-1].partition(".")[0].lower() not in _ABOUT


def describe_left_out(names: Sequence[str]) -> tuple[str, ...]:
    """Return a note on files that were left out, as a clause; none if there are none."""
    if not names:
        return ()
    files = f"{len(names):,} files that are not examples" if len(names) > 1 else "1 file that is not an example"
    ellipsis = ", ..." if len(names) > 3 else ""
    listed = ", ".join(map(escape_controls, names[:3]))
    return (f"left out {files} ({listed}{ellipsis})",)


def has_texts(path: Path) -> bool:
    """Check whether a folder contains folders with text files."""
    return os.path.isdir(path) and any(file.parent != path for file in path.rglob("*.txt"))


def read_texts(root: Path, encoding: str | None) -> ReadTable:
    """Read a folder with one folder of text files for each class, or with one for each domain that contains those.

    Files beside the folders, and those that are no examples (a README), are left out and counted.

    Raises:
        ValueError: If the folder is laid out differently, or a file cannot be decoded.
    """
    files = {path.relative_to(root).parts: path for path in sorted(root.rglob("*")) if path.is_file()}
    examples = {
        parts: path
        for parts, path in files.items()
        if path.suffix.lower() in TEXTS and is_example(parts) and len(parts) > 1
    }
    left_out = ["/".join(parts) for parts in files if parts not in examples]
    contents = {parts: path.read_bytes() for parts, path in examples.items()}
    return make_text_table(contents, root.name, encoding, left_out)


def make_text_table(
    files: Mapping[tuple[str, ...], bytes], name: str, encoding: str | None, left_out: Sequence[str] = ()
) -> ReadTable:
    """Return text files as a table with the columns ``text``, ``label``, ``file`` and, if there are any, ``domain``.

    Raises:
        ValueError: If the files are laid out differently, or one cannot be decoded.
    """
    classes = infer_classes(list(files), name, TEXTS)
    decoded = decode_all({"/".join(parts): content for parts, content in files.items()}, encoding)
    texts = [text for text, _ in decoded]
    other = Counter(detected for _, detected in decoded if encoding is None and detected != "utf-8")
    notes = [
        f"detected encoding {detected} in {count} of {len(texts)} files (data.encoding)"
        for detected, count in other.items()
    ]
    columns = {"text": texts, **classes, "file": ["/".join(parts) for parts in files]}
    return ReadTable(pa.table(columns), notes=(*notes, *describe_left_out(left_out)))
