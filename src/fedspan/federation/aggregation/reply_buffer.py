"""Replies that wait for the end of an attempt, in memory or, beyond a budget, encoded in a temporary file."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from fedspan.core.values import Message
from fedspan.errors import FedspanError
from fedspan.federation import serialization
from fedspan.files import convert_disk_errors

_IN_MEMORY = 256 << 20
"""Bytes of all replies beyond which they, or further ones, move to a file."""
_TENSOR_BYTES = 1024
"""Bytes that a tensor takes beside its numbers, generously."""
_RESERVE = 1 << 30
"""Bytes of the disk that replies leave free for everything else."""
_CURE = (
    "set the environment variable TMPDIR to a folder on a larger disk, or lower federation.clients_per_round; replies "
    "do not wait where nothing compares them (federation.clip_ratio: null, in the simulator without simulation)"
)


class ReplyBuffer:
    """Encoded replies by client.

    Args:
        in_memory: Bytes of all replies beyond which they move to a file without a name, which ends with the process.
        on_disk: Bytes that the file may have; None: the free space of the folder for temporary files when they move
            there, less 1 GiB.
    """

    def __init__(self, in_memory: int = _IN_MEMORY, on_disk: int | None = None) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=in_memory)  # noqa: SIM115
        self._places: dict[str, tuple[int, int]] = {}
        self._in_memory, self._on_disk = in_memory, on_disk

    def store(self, id: str, body: bytes) -> None:
        """Store the reply of a client; one that it sent before is no longer returned.

        Raises:
            FedspanError: If it exceeds the budget, or the disk is full.
        """
        folder = Path(tempfile.gettempdir())
        with convert_disk_errors(folder, _CURE, field="TMPDIR"):
            start = self._file.seek(0, os.SEEK_END)
            if start + len(body) > self._in_memory:
                self._require_space(start + len(body), folder)
            self._file.write(body)
        self._places[id] = start, len(body)

    def _require_space(self, size: int, folder: Path) -> None:
        if self._on_disk is None:
            self._on_disk = max(0, shutil.disk_usage(folder).free - _RESERVE)
        if size > self._on_disk:
            problem = (
                f"the replies that wait for the end of the round take {size >> 20} MiB, and their budget in "
                f"{str(folder)!r} is {self._on_disk >> 20} MiB. {_CURE[0].upper()}{_CURE[1:]}"
            )
            raise FedspanError("TMPDIR", str(folder), problem=problem)

    def load(self, id: str) -> bytes:
        """Return the reply of a client."""
        position, length = self._places[id]
        self._file.seek(position)
        return self._file.read(length)

    def close(self) -> None:
        """Free the memory or disk space of all replies."""
        self._file.close()
        self._places.clear()


class MessageBuffer:
    """Messages of replies by client.

    Args:
        in_memory: Bytes of decoded messages beyond which further ones wait in a file, encoded.
    """

    def __init__(self, in_memory: int = _IN_MEMORY) -> None:
        self._left = in_memory
        self._decoded: dict[str, tuple[Message, int]] = {}
        self._encoded = ReplyBuffer(in_memory=1)

    def store(self, id: str, message: Message, body: bytes) -> None:
        """Store the message of a client; one that it sent before is no longer returned.

        Raises:
            FedspanError: If it exceeds the budget on the disk, or the disk is full.
        """
        self.discard(id)
        size = len(body) + _TENSOR_BYTES * len(message.tensors)  # an encoded message holds the bytes of its tensors
        if size <= self._left:
            self._decoded[id] = message, size
            self._left -= size
        else:
            self._encoded.store(id, body)

    def load(self, id: str) -> Message:
        """Return the message of a client."""
        return self._decoded[id][0] if id in self._decoded else serialization.decode(self._encoded.load(id))

    def discard(self, id: str) -> None:
        """Free the memory of a client's message, if there is one; the file keeps its size."""
        if id in self._decoded:
            self._left += self._decoded.pop(id)[1]

    def close(self) -> None:
        """Free the memory and disk space of all messages."""
        self._decoded.clear()
        self._encoded.close()
