"""Paths with braces, and the files that match them (``clinics/{hospital}/train.csv``)."""

from __future__ import annotations

import os
import re
from pathlib import Path

from fedspan.errors import FedspanError

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
        option: The user's name of the option.

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
