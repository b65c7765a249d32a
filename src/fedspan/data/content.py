"""Identity of a data source by its content: a copy, a link or a new name of the same files is the same data."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from fedspan.data.multiple_files import has_placeholders, match_paths
from fedspan.errors import FedspanError

_LEAST_AGE_NS = 2_000_000_000
"""Nanoseconds since a file's last change from which its digest is cached: a later change gets another time."""


def compute_content_digest(user_path: str, option: str) -> str:
    """Compute a digest of the files that a source names.

    It covers the bytes of all files, in an order that does not depend on their names. Hidden files are left out. A
    source without local files (a hub id, a built-in corpus) is identified by its name. This process reads a file again
    only if its size, its times or its inode changed, or if it was written in the last two seconds.

    Args:
        user_path: A file, a folder, a path with places (``clinics/{hospital}/train.csv``), or a name.

    Returns:
        SHA-256 in hexadecimal digits.
    """
    try:
        digests = sorted(_compute_file_digest(path) for path in _list_files(user_path, option))
    except OSError as error:
        raise FedspanError(option, user_path, f"files that can be read ({error.strerror})") from error
    content = ["files", *digests] if digests else ["name", user_path]
    return hashlib.sha256("\n".join(content).encode(errors="surrogatepass")).hexdigest()


def _list_files(user_path: str, option: str) -> Iterator[Path]:
    path = Path(os.path.expanduser(user_path))
    if has_placeholders(user_path):
        yield from match_paths(user_path, option)
    elif os.path.isfile(path):
        yield path
    elif os.path.isdir(path):
        for inside in path.rglob("*"):
            hidden = any(part.startswith(".") for part in inside.relative_to(path).parts)
            if not hidden and inside.is_file():
                yield inside


def _compute_file_digest(path: Path) -> str:
    status = path.stat()
    version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    is_settled = time.time_ns() - status.st_mtime_ns >= _LEAST_AGE_NS
    compute = _compute_version_digest if is_settled else _compute_version_digest.__wrapped__
    return compute(path.absolute(), version)


@lru_cache(maxsize=2**16)
def _compute_version_digest(path: Path, version: tuple[int, ...]) -> str:
    """Compute the digest of a file; ``version`` tells the cache versions of the file apart."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
