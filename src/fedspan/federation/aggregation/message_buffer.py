"""Replies that wait for the end of an attempt: decoded in memory and, beyond a budget, encoded in a temporary file."""

from __future__ import annotations

from fedspan.core.values import Message
from fedspan.federation import serialization
from fedspan.federation.aggregation.reply_buffer import ReplyBuffer

_IN_MEMORY = 256 << 20
"""Bytes of decoded messages beyond which further ones wait in a file."""
_TENSOR_BYTES = 1024
"""Bytes that a tensor takes beside its numbers, generously."""


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
