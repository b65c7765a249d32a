"""Files that are either whole or absent, whatever stops the process: the primitives under the run folder."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shlex
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from fedspan.errors import FedspanError

_TEMPORARY = re.compile(r".+\.tmp-\d+$")
_FULL = {errno.ENOSPC, errno.EDQUOT} if hasattr(errno, "EDQUOT") else {errno.ENOSPC}


@contextmanager
def convert_disk_errors(folder: Path, cure: str = "", field: str = "run folder") -> Generator[None, None, None]:
    """Convert errors of the file system within this context to an error that tells how to continue.

    Args:
        cure: The remedy that the error proposes; empty: to correct the cause and resume.

    Raises:
        FedspanError: For any ``OSError``; a full disk is named as such.
    """
    try:
        yield
    except OSError as error:
        full = error.errno in _FULL
        place = f" ({error.filename})" if error.filename not in (None, str(folder)) else ""
        reason = "the disk is full" if full else f"{error.strerror or error}{place}"
        remedy = "free some space" if full else "put that right"
        cure = cure or f"the last finished round is intact: {remedy}, then use --resume"
        problem = f"{str(folder)!r} cannot be used: {reason}. {cure[0].upper()}{cure[1:]}"
        raise FedspanError(field, str(folder), problem=problem) from error


def build_temporary_path(path: Path) -> Path:
    """Return the path at which a file is written before it is renamed to ``path``; both are on one disk."""
    return path.with_name(f"{path.name}.tmp-{os.getpid()}")


def is_temporary(path: Path) -> bool:
    """Check whether a file name was made by ``build_temporary_path``: the file is incomplete."""
    return _TEMPORARY.match(path.name) is not None


def remove(path: Path) -> None:
    """Delete a file, or a folder with its content, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def require_no_link(path: Path) -> None:
    """Check that a file or folder that a run owns is not a symbolic link.

    Raises:
        FedspanError: If the path is a link; its target may belong to something else.
    """
    if path.is_symlink():
        target = os.readlink(path)
        problem = f"it is a link to {target!r}, and a run deletes and replaces the files in it. Move the files here"
        raise FedspanError(str(path), target, problem=problem)


def make_private_folder(folder: Path, field: str) -> None:
    """Create a folder that no other user can enter, or check that an existing one is such; an empty one becomes it.

    Raises:
        FedspanError: If other users may enter a folder that has files, or it cannot be created.
    """
    with convert_disk_errors(folder, "choose another folder", field):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.name != "posix" or not folder.stat().st_mode & 0o077:
            return
        if any(folder.iterdir()):  # who shares them with whom, and why, is not known here
            problem = f"other users can read what is in {folder}. Run: chmod 700 {shlex.quote(str(folder))}"
            raise FedspanError(field, str(folder), problem=problem)
        folder.chmod(0o700)


@contextmanager
def restrict_new_files() -> Generator[None]:
    """Allow no other user to read or write the files that this process creates within this context."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def delete_temporary_files(folder: Path) -> None:
    """Delete incomplete files of killed processes in a folder. Call it only while holding the run's lock."""
    if folder.is_dir():
        for entry in folder.iterdir():
            if is_temporary(entry):
                remove(entry)


def fsync_folder(folder: Path) -> None:
    """Make renames and new names in a folder survive a power cut."""
    if os.name == "nt":  # Windows cannot open a folder, and orders its own renames
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Make a folder that a library wrote, and everything below it, survive a power cut."""
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            fsync_folder(path)
        else:
            with path.open("r+b") as file:  # Windows syncs only what is open for writing
                os.fsync(file.fileno())


def write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes; a single ``os.write`` may take only some of them (2 GiB at most on Linux)."""
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(descriptor, remaining) :]


def write_file(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a new file and wait until it is on the disk."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags, mode)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write or replace a file so that at every moment it holds either all of the old or all of the new."""
    partial = build_temporary_path(path)
    try:
        write_file(partial, data, mode)
        partial.replace(path)
    except BaseException:
        with suppress(OSError):  # the first error is the one to report
            remove(partial)
        raise
    fsync_folder(path.parent)


def read_bytes(path: Path) -> bytes:
    """Read a file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise _build_unreadable_error(path, error) from error


def _build_unreadable_error(path: Path, error: OSError) -> FedspanError:
    reason = error.strerror or str(error)
    return FedspanError(str(path), reason, problem=f"the file cannot be read ({reason})")


def compute_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal digits."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _build_unreadable_error(path, error) from error


class DamagedFileError(FedspanError):
    """A file of a checkpoint differs from what was written; older checkpoints may be intact. Not for other versions."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(str(path), reason, problem=f"the checkpoint is damaged ({reason})")


def read_checkpoint_file(path: Path) -> bytes:
    """Read a file of a checkpoint.

    Raises:
        DamagedFileError: If there is no such file.
        FedspanError: If this user has no permission to read it.
    """
    try:
        return path.read_bytes()
    except PermissionError as error:
        raise FedspanError(
            str(path), "no permission", problem="this user has no permission to read the file"
        ) from error
    except OSError as error:
        raise DamagedFileError(path, error.strerror or str(error)) from error


def _to_json_value(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_value(item) for item in value]
    return value


def to_json(value: object, indent: int | None = None) -> str:
    """Encode a value as strict JSON, on one line or indented.

    JSON has no NaN and no infinities: they become null, which pandas reads as NaN. A string instead could also be the
    id of a client.

    Raises:
        TypeError: If a value has no JSON form, such as a tensor.
    """
    return json.dumps(_to_json_value(value), allow_nan=False, indent=indent)


def from_json(data: bytes) -> object:
    """Decode a JSON text in UTF-8.

    Raises:
        ValueError: If it is not JSON in UTF-8.
    """
    try:
        return json.loads(data.decode())
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def neutralize_formula(cell: str) -> str:
    """Put an apostrophe before a cell of a table that spreadsheets would run as a formula; numbers stay as they are."""
    if not cell.startswith(("=", "+", "-", "@", "\t", "\r")):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def build_folder_name(client: str) -> str:
    """Return the name of the folder of a client; different ids have different names."""
    name = quote(client, safe=" ,;+@=()")
    if not name.strip(" ."):  # "..", to the file system, is somewhere else
        name = name.replace(".", "%2E").replace(" ", "%20")
    return name if len(name) <= 120 else f"{name[:80]}-{hashlib.sha256(client.encode()).hexdigest()[:16]}"
