"""Zip and tar archives of images or text files by class, read into memory.

Nothing is unpacked to the disk. An archive is untrusted: names that lead out of it, links, devices and contents beyond
the limits are refused.
"""

from __future__ import annotations

import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Collection, Generator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from fedspan.data.folders import is_example

SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
_FILE_BYTES = 1 << 28
"""Maximum size of one file, 256 MiB."""
_TOTAL_BYTES = 1 << 34
"""Maximum total size of all files, 16 GiB."""
_FILES = 5_000_000
_CHUNK = 1 << 20

_Entry = tuple[str, IO[bytes]]


def read_archive(path: Path, suffixes: Collection[str]) -> tuple[dict[tuple[str, ...], bytes], list[str]]:
    """Read the files of an archive that may be examples: those with one of the suffixes and no README.

    Folders that contain all files (``flowers/rose/1.jpg``) are removed from the names, as long as classes remain.

    Returns:
        The contents of the files by the parts of their names, sorted, and the names of all other files.

    Raises:
        ValueError: If the archive is damaged, an entry leads out of it or is a link or a device, or it is too large.
    """
    files: dict[tuple[str, ...], bytes] = {}
    others: list[str] = []
    total = 0
    try:
        with _open_entries(path) as entries:
            for number, (name, stream) in enumerate(entries):
                if number >= _FILES:
                    raise ValueError(f"more than {_FILES:,} files")
                parts = _split_name(name)
                if PurePosixPath(name).suffix.lower() not in suffixes or not is_example(parts):
                    others.append(name)
                    continue
                files[parts] = _read_bounded(name, stream, min(_FILE_BYTES, _TOTAL_BYTES - total))
                total += len(files[parts])
    except (
        *(zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError),
        *(EOFError, RuntimeError, NotImplementedError),
    ) as error:
        # RuntimeError: a password is needed; NotImplementedError: a method of compression that Python lacks.
        raise ValueError(str(error) or type(error).__name__) from error
    return _strip_shared_folders(dict(sorted(files.items()))), others


@contextmanager
def _open_entries(path: Path) -> Generator[Generator[_Entry]]:
    if path.name.lower().endswith(".zip"):
        with zipfile.ZipFile(path) as archive:
            yield _iterate_zip(archive)
    else:
        with tarfile.open(path, "r:*") as archive:
            yield _iterate_tar(archive)


def _iterate_zip(archive: zipfile.ZipFile) -> Generator[_Entry]:
    for info in archive.infolist():
        kind = stat.S_IFMT(info.external_attr >> 16)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise ValueError(f"{info.filename} is a link or a device, which is not followed")
        if not info.is_dir():
            with archive.open(info) as stream:
                yield info.filename, stream


def _iterate_tar(archive: tarfile.TarFile) -> Generator[_Entry]:
    for info in archive:
        if info.isdir():
            continue
        stream = archive.extractfile(info) if info.isreg() else None
        if stream is None:
            raise ValueError(f"{info.name} is a link or a device, which is not followed")
        yield info.name, stream
    assert archive.fileobj is not None
    archive.fileobj.seek(archive.offset)
    if len(archive.fileobj.read(tarfile.BLOCKSIZE)) < tarfile.BLOCKSIZE:  # tarfile accepts any end of the file
        raise ValueError("the archive is truncated")


def _split_name(name: str) -> tuple[str, ...]:
    """Split an entry's name, which must not lead out of the archive."""
    path = PurePosixPath(name.replace("\\", "/"))
    parts = tuple(part for part in path.parts if part != ".")
    if path.is_absolute() or ".." in parts or not parts or ":" in parts[0] or "\0" in name:
        raise ValueError(f"{name!r} leads out of the archive")
    return parts


def _read_bounded(name: str, stream: IO[bytes], limit: int) -> bytes:
    """Read a file of at most `limit` bytes, regardless of the size that the archive declares."""
    content = bytearray()
    while chunk := stream.read(_CHUNK):
        content += chunk
        if len(content) > limit:
            raise ValueError(
                f"{name} exceeds the bounds ({_FILE_BYTES >> 20} MiB a file, {_TOTAL_BYTES >> 30} GiB in all)"
            )
    return bytes(content)


def _strip_shared_folders(files: dict[tuple[str, ...], bytes]) -> dict[tuple[str, ...], bytes]:
    while files and min(map(len, files)) > 2 and len({parts[0] for parts in files}) == 1:
        files = {parts[1:]: content for parts, content in files.items()}
    return files
