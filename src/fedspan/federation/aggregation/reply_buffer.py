"""Encoded replies that wait for the end of an attempt, in memory or, beyond a budget, in a temporary file."""

from __future__ import annotations

import os
import tempfile

__all__ = ["ReplyBuffer"]

_IN_MEMORY = 256 << 20
"""Bytes of all replies beyond which they move to a file."""


class ReplyBuffer:
    """Encoded replies by client.

    Args:
        in_memory: Bytes of all replies beyond which they move to a file without a name, which ends with the process.
    """

    def __init__(self, in_memory: int = _IN_MEMORY) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=in_memory)  # noqa: SIM115
        self._places: dict[str, tuple[int, int]] = {}

    def store(self, id: str, body: bytes) -> None:
        """Store the reply of a client; one that it sent before is no longer returned."""
        self._places[id] = self._file.seek(0, os.SEEK_END), len(body)
        self._file.write(body)

    def load(self, id: str) -> bytes:
        """Return the reply of a client.

        Raises:
            KeyError: If there is none.
        """
        position, length = self._places[id]
        self._file.seek(position)
        return self._file.read(length)

    def close(self) -> None:
        """Free the memory or disk space of all replies."""
        self._file.close()
        self._places.clear()
