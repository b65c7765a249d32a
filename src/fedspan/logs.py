"""Append-only logs of JSON lines in which every line is chained to all lines before it.

A line ends with the field ``chain``: the SHA-256 of the previous line's ``chain`` and of the line without that field. A
changed, missing, added or moved line therefore breaks the chain at a line that can be named. Anyone who rewrites a
whole log can compute a new chain, so the head of a log (the last line's ``chain``) is stored elsewhere too: in
checkpoints and reports of a run.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Self

from filelock import FileLock

from fedspan.errors import FedspanError
from fedspan.files import convert_disk_errors, from_json, fsync_folder, read_bytes, to_json, write_all

_CHAIN = re.compile(rb', "chain": "([0-9a-f]{64})"\}$')
_ENDED = re.compile(rb', "chain": "[0-9a-f]{64}"\}.', re.DOTALL)
"""A whole line that ends in something else than a newline: nobody who writes a line leaves one."""


class Position(NamedTuple):
    """The end of a log at some moment.

    Args:
        length: Length of the log in bytes.
        head: The last line's ``chain``, 64 hexadecimal digits.
    """

    length: int
    head: str


EMPTY = Position(0, "0" * 64)


def encode_chain_line(head: str, row: Mapping[str, object]) -> tuple[str, bytes]:
    """Encode a line of a log.

    Args:
        head: The previous line's ``chain``, or that of ``EMPTY``.
        row: The line's fields; at least one.

    Returns:
        The line's own ``chain``, and the line with its final newline.

    Raises:
        TypeError: If a value has no JSON form, such as a tensor.
    """
    body = to_json(row).encode()
    digest = _compute_digest(head, body)
    return digest, body[:-1] + f', "chain": "{digest}"}}\n'.encode()


def _compute_digest(head: str, body: bytes) -> str:
    return hashlib.sha256(head.encode() + body).hexdigest()


def _read_lines(path: Path, data: bytes, head: str = EMPTY.head, first: int = 1) -> Iterator[tuple[int, bytes, str]]:
    """Yield number, content without ``chain``, and ``chain`` of every complete line from the line ``first`` on."""
    *lines, rest = data.split(b"\n")
    for number, line in enumerate(lines, first):
        match = _CHAIN.search(line)
        body = b"" if match is None else line[: match.start()] + b"}"
        if match is None or _compute_digest(head, body) != match[1].decode():
            problem = (
                "the line was changed after it was written, or a line before it is missing: its chain digest does "
                "not match. Restore the file"
            )
            raise FedspanError(f"{path}, line {number}", line, problem=problem)
        head = match[1].decode()
        yield number, body, head
    if _ENDED.search(rest):
        raise _build_end_error(f"{path}, line {first + len(lines)}")


def _build_end_error(field: str) -> FedspanError:
    problem = "the last line was changed after it was written: it does not end where it did. Restore the file"
    return FedspanError(field, None, problem=problem)


def read_lines(path: Path) -> Iterator[dict[str, object]]:
    """Yield the rows of a log, of a finished or a running run, without ``chain``; none if there is no file.

    An incomplete last line is skipped: it was being written.

    Raises:
        FedspanError: If a line does not continue the chain, or is not a JSON object; the error names its number.
    """
    for number, body, _ in _read_lines(path, read_bytes(path) if path.exists() else b""):
        yield _parse_row(path, number, body)


def _parse_row(path: Path, number: int, body: bytes) -> dict[str, object]:
    try:
        row = from_json(body)
    except ValueError as error:
        raise FedspanError(f"{path}, line {number}", body, "a JSON object") from error
    if not isinstance(row, dict):
        raise FedspanError(f"{path}, line {number}", body, "a JSON object")
    return row


class _LongLineError(FedspanError):
    """A line is longer than a follower's limit."""


class LogFollower:
    """Reads the new lines of a log that another process appends to, which may also truncate it when it resumes.

    Args:
        limit: Largest number of bytes that one call reads; the rest is left to the next call.
    """

    def __init__(self, path: Path, limit: int = 1 << 25) -> None:
        self._path, self._limit = path, limit
        self._position, self._lines = EMPTY, 0

    def read(self) -> tuple[list[dict[str, object]], bool]:
        """Return the rows after those of the last call, and whether they begin at the first line (again).

        They begin again if the file no longer continues the lines that were read.

        Raises:
            FedspanError: If a line does not continue the chain, is not a JSON object, or is longer than the limit.
        """
        if self._lines:
            try:
                return self._read_on(), False
            except _LongLineError:
                raise
            except FedspanError:  # truncated, and perhaps continued with other lines
                self._position, self._lines = EMPTY, 0
        return self._read_on(), True

    def _read_on(self) -> list[dict[str, object]]:
        try:
            with self._path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._position.length:
                    raise FedspanError(str(self._path), size, problem="the file is shorter than before")
                file.seek(self._position.length)
                data = file.read(self._limit)
        except FileNotFoundError:
            if not self._lines:
                return []
            raise FedspanError(str(self._path), None, problem="the file is gone") from None
        except OSError as error:
            problem = f"the file cannot be read ({error.strerror or error})"
            raise FedspanError(str(self._path), None, problem=problem) from error
        if len(data) == self._limit and b"\n" not in data:
            number = self._lines + 1
            raise _LongLineError(f"{self._path}, line {number}", None, f"a line of at most {self._limit} bytes")
        lines = list(_read_lines(self._path, data, self._position.head, self._lines + 1))
        rows = [_parse_row(self._path, number, body) for number, body, _ in lines]
        if lines:
            self._lines, _, head = lines[-1]
            self._position = Position(self._position.length + data.rfind(b"\n") + 1, head)
        return rows


def find_position(path: Path) -> Position:
    """Return the end of a log's last complete line; ``EMPTY`` if there is no file."""
    data = read_bytes(path) if path.exists() else b""
    return _compute_position(path, data)


def _compute_position(path: Path, data: bytes) -> Position:
    head = EMPTY.head
    for _, _, head in _read_lines(path, data):  # noqa: B007
        pass
    return Position(data.rfind(b"\n") + 1, head)


def require_position(path: Path, position: Position) -> None:
    """Check that a log starts with exactly the lines that it had at a position; more may follow.

    Raises:
        FedspanError: If it is shorter, or a line was changed; the error names the line where one can be named.
    """
    data = read_bytes(path) if path.exists() else b""
    prefix = data[: position.length]
    if len(prefix) < position.length or not (prefix.endswith(b"\n") or not prefix):
        problem = (
            f"at the checkpoint a line ended at byte {position.length}, and the file has {len(data)} bytes now. "
            "Restore the file or start again in another folder"
        )
        _compute_position(path, data)  # an error that names the line comes first
        raise FedspanError(str(path), f"{len(data)} bytes", problem=problem)
    if _compute_position(path, prefix).head != position.head:
        problem = (
            "the file is a log of another run, or was rewritten as a whole: its head is not the one that the "
            "checkpoint names. Restore the file or start again in another folder"
        )
        raise FedspanError(str(path), f"{len(data)} bytes", problem=problem)


class JsonLines:
    """An append-only log of one writer, such as the metrics. NaN and infinities: ``files.to_json``.

    Args:
        path: The file; created if missing, and cut after its last complete line.

    Raises:
        FedspanError: If it cannot be opened, or a line does not continue the chain.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending: list[bytes] = []
        with convert_disk_errors(path.parent):
            new = not path.exists()
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
            self._descriptor = os.open(path, flags, 0o644)
            if new:
                fsync_folder(path.parent)
        try:
            self._position = find_position(path)
            if os.fstat(self._descriptor).st_size > self._position.length:
                os.ftruncate(self._descriptor, self._position.length)  # a line that a killed process wrote in part
        except BaseException:
            os.close(self._descriptor)
            raise
        self._head = self._position.head

    def append(self, row: Mapping[str, object]) -> None:
        """Add a line. It reaches the file at the next ``commit``."""
        self._head, line = encode_chain_line(self._head, row)
        self._pending.append(line)

    def commit(self) -> Position:
        """Write the lines since the last commit, wait until they are on the disk, and return the file's end.

        Raises:
            FedspanError: If the disk is full or cannot be written; the file then keeps its previous length.
        """
        data = b"".join(self._pending)
        with convert_disk_errors(self._path.parent):
            try:
                write_all(self._descriptor, data)
                os.fsync(self._descriptor)
            except OSError:
                with suppress(OSError):  # so that a retry adds no line twice
                    os.ftruncate(self._descriptor, self._position.length)
                raise
        self._pending.clear()
        self._position = Position(self._position.length + len(data), self._head)
        return self._position

    def close(self) -> None:
        """Close the file; uncommitted lines belong to an unfinished round and are dropped."""
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AuditLog:
    """A log of what happened on a server or a node, which several processes may append to.

    Entries have ``time`` (UTC), ``event`` and details: client, run, round, sizes and digests. They
    hold no data, no tensors and no text of examples.

    Args:
        path: The file; created with the first entry, readable by its owner alone.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, event: str, **facts: object) -> str:
        """Append an entry, wait until it is on the disk, and return its time (UTC, ISO 8601).

        Raises:
            FedspanError: If the log cannot be written, or its end was changed. What cannot be logged must not happen.
        """
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        row = {"time": time, "event": event, **facts}
        with convert_disk_errors(self.path.parent, "free some space", field="audit log"):
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with FileLock(self.path.with_name(f"{self.path.name}.lock"), mode=0o600):
                flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
                descriptor = os.open(self.path, flags, 0o600)
                try:
                    end = self._find_end(descriptor)
                    os.ftruncate(descriptor, end.length)  # cuts a line that a killed process wrote in part
                    os.lseek(descriptor, 0, os.SEEK_END)
                    write_all(descriptor, encode_chain_line(end.head, row)[1])
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        return time

    def _find_end(self, descriptor: int) -> Position:
        """Return the end of the last complete line, from the file's last bytes; the rest is not read."""
        size, tail = os.fstat(descriptor).st_size, b""
        while len(tail) < size:
            start = max(0, size - 2 * len(tail) - 2**16)
            os.lseek(descriptor, start, os.SEEK_SET)
            tail = os.read(descriptor, size - start)
            last = tail.rfind(b"\n")
            if _ENDED.search(tail[last + 1 :]):
                raise _build_end_error(str(self.path))
            before = tail.rfind(b"\n", 0, max(last, 0))
            if last >= 0 and (before >= 0 or start == 0):
                match = _CHAIN.search(tail[before + 1 : last])
                if match is None:
                    problem = "the last line is not one of an audit log. Move the file away to begin a new one"
                    raise FedspanError(str(self.path), None, problem=problem)
                return Position(start + last + 1, match[1].decode())
        return EMPTY

    def read(self) -> list[dict[str, object]]:
        """Return all entries, after checking that each continues the chain."""
        return list(read_lines(self.path))
