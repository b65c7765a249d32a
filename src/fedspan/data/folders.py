"""Folders of files by class: their layout, and text files in them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from fedspan.data.encodings import decode_all
from fedspan.data.reading import Read

__all__ = ["TEXTS", "classes_of", "holds_texts", "is_visible", "read_texts", "texts_table"]

TEXTS = (".txt",)
_PARTS = {"train", "test", "val", "valid", "validation"}


def classes_of(paths: Sequence[Sequence[str]], name: str, suffixes: Collection[str]) -> dict[str, list[str]]:
    """Return the classes of files, and their domains if there are any, from the folders that they are in.

    Args:
        paths: The files' paths, in parts, as seen from the folder.
        name: The folder's name.
        suffixes: Suffixes of the files, for the error.

    Raises:
        ValueError: If there are none, or they are laid out differently.
    """
    if not paths:
        raise ValueError(f"{name} holds none ({', '.join(suffixes)})")
    depths = {len(parts) for parts in paths}
    if depths not in ({2}, {3}):
        odd = next(parts for parts in paths if len(parts) not in (2, 3) or len(depths) > 1)
        raise ValueError(f"{'/'.join(odd)} does not lie there as class/file, or domain/class/file for all of them")
    tops = {parts[0] for parts in paths}
    if depths == {3} and tops <= _PARTS:
        raise ValueError(f"it holds the parts {', '.join(sorted(tops))}; name the folder of one")
    label = [parts[-2] for parts in paths]
    return {"label": label} if depths == {2} else {"label": label, "domain": [parts[0] for parts in paths]}


def is_visible(parts: Sequence[str]) -> bool:
    """Check whether no part of a path is hidden, or one of those that macOS adds to an archive."""
    return not any(part.startswith(".") or part == "__MACOSX" for part in parts)


def holds_texts(path: Path) -> bool:
    """Check whether a folder contains folders with text files."""
    return os.path.isdir(path) and any(file.parent != path for file in path.rglob("*.txt"))


def read_texts(root: Path, encoding: str | None) -> Read:
    """Read a folder with one folder of text files for each class, or with one for each domain that contains those.

    Text files beside the folders (a README) are left out.

    Raises:
        ValueError: If the folder is laid out differently, or a file cannot be decoded.
        OSError: If a file cannot be read.
    """
    found = sorted(path for path in root.rglob("*") if path.suffix.lower() in TEXTS and path.is_file())
    files = {path.relative_to(root).parts: path for path in found}
    return texts_table(
        {parts: path.read_bytes() for parts, path in files.items() if len(parts) > 1}, root.name, encoding
    )


def texts_table(files: Mapping[tuple[str, ...], bytes], name: str, encoding: str | None) -> Read:
    """Return text files as a table with the columns ``text``, ``label``, ``file`` and, if there are any, ``domain``.

    Args:
        files: Content of the files by path.
        name: Name of the folder.
        encoding: Encoding of the files; None: detected for each.

    Raises:
        ValueError: If the files are laid out differently, or one cannot be decoded.
    """
    files = {parts: content for parts, content in files.items() if is_visible(parts)}
    classes = classes_of(list(files), name, TEXTS)
    decoded = decode_all({"/".join(parts): content for parts, content in files.items()}, encoding)
    texts = [text for text, _ in decoded]
    other = Counter(found for _, found in decoded if encoding is None and found != "utf-8")
    notes = [
        f"detected encoding {found} in {count} of {len(texts)} files (data.encoding)" for found, count in other.items()
    ]
    columns = {"text": texts, **classes, "file": ["/".join(parts) for parts in files]}
    return Read(pa.table(columns), notes=tuple(notes))
