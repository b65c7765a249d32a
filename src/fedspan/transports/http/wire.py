"""The protocol of a node and its server: versions, sizes, ranges, and parts with their lengths before them.

A message (``signing``) is its version, the length of its head, the head, and the body. The head is sealed to the
receiver's key and holds the key of the body, so that one body serves many receivers: it is encrypted once
and stored once. A node fetches a message in ranges and sends one in parts of at most ``CHUNK`` bytes, which common
proxies pass on, and a request waits at most ``POLL_SECONDS``.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from threading import RLock
from typing import Any, NamedTuple

import httpx

KEPT_ALIVE = 60.0
"""Seconds for which an idle connection is kept: longer than heartbeats are apart."""
PROTOCOLS = (1,)
"""Versions of the protocol that this release speaks. A node offers its own, and the server chooses the highest of both.
The paths of version 1 begin with ``/v1/``; ``/v1/join`` and ``/v1/health`` stay as they are in all versions."""
CHUNK = 2**20
"""Maximum number of bytes of a request's body, and of a message in an answer."""
POLL_SECONDS = 50.0
"""Maximum number of seconds for which an answer waits."""

LENGTH = 4
"""Size in bytes of the length before a part."""
_WORK = re.compile(r"([a-z][a-z ]{0,30})/([0-9]{1,3})?")
_RANGE = re.compile(r"bytes=([0-9]{1,15})-")


class NodeWork(NamedTuple):
    """What a node does.

    Args:
        doing: In small letters and blanks, such as ``training``.
        percent: How much of that is done; None: unknown.
    """

    doing: str
    percent: int | None

    def to_text(self) -> str:
        """Return the text of which ``parse_work`` returns this."""
        return f"{self.doing}/{'' if self.percent is None else self.percent}"


def parse_work(text: str) -> NodeWork | None:
    """Return what a node reports that it does; None: nothing that a page may show."""
    match = _WORK.fullmatch(text)
    return None if match is None else NodeWork(match[1], None if match[2] is None else min(100, int(match[2])))


def parse_range(text: str) -> int:
    """Return the first byte that a request's ``Range`` names; without one, 0."""
    match = _RANGE.fullmatch(text)
    return 0 if match is None else int(match[1])


def pack(parts: Iterable[bytes]) -> bytes:
    """Join parts, each with its length before it, so that no two lists of parts give equal bytes."""
    return b"".join(piece for part in parts for piece in (len(part).to_bytes(LENGTH, "big"), part))


def unpack(data: bytes, count: int) -> list[bytes]:
    """Split what ``pack`` joined.

    Raises:
        ValueError: If the data are not that number of parts.
    """
    parts, start = list[bytes](), 0
    while start < len(data) and len(parts) < count:
        end = start + LENGTH
        end += int.from_bytes(data[start:end], "big")
        parts.append(data[start + LENGTH : end])
        start = end
    if start != len(data) or len(parts) != count:
        raise ValueError(f"not {count} parts with their lengths before them")
    return parts


class SharedClient(httpx.Client):
    """A client of several threads, which closes its connections after the last request of their ``stream``.

    A thread that waits for an answer would read on from the number of a closed socket, which may be a file's by then.
    """

    _counting, _requests, _is_left = RLock(), 0, False

    @contextmanager
    def stream(self, *args: Any, **options: Any) -> Generator[httpx.Response]:
        """Send a request, and yield its answer."""
        with self._counting:
            if self._is_left:
                raise httpx.HTTPError("the connection was given up")
            self._requests += 1
        try:
            with super().stream(*args, **options) as response:
                yield response
        finally:
            with self._counting:
                self._requests -= 1
            if self._is_left:
                self.close()

    def close(self) -> None:
        """Send no further requests."""
        with self._counting:
            self._is_left = True
            if self._requests:
                return
        super().close()

    def __exit__(self, *_: object) -> None:
        self.close()
