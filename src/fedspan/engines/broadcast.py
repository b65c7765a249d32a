"""Messages through the wire format and back, as they travel between a server and clients in one process."""

from __future__ import annotations

from dataclasses import replace

from fedspan.core.values import Message
from fedspan.engines import wire
from fedspan.engines.outcomes import Direction, Transfer

__all__ = ["Broadcast", "the_very_same", "travel"]


def travel(message: Message, client: str, direction: Direction, transfers: list[Transfer]) -> Message:
    """Through the wire format and back: what is counted is what arrives, and nothing else arrives."""
    data = wire.encode(message)
    transfers.append(Transfer(client, direction, len(data), wire.payload_size(message)))
    return wire.decode(data)


class Broadcast:
    """What goes down, encoded once for all clients in a row that are sent the very same tensors."""

    def __init__(self) -> None:
        self._sent: Message | None = None
        self._arrived = Message()
        self._transfers: list[Transfer] = []

    def travel(self, message: Message, client: str, transfers: list[Transfer]) -> Message:
        """``travel`` downwards; the tensors that arrive may be those that arrived at others."""
        if self._sent is None or not the_very_same(message, self._sent):
            self._transfers.clear()
            self._sent, self._arrived = message, travel(message, client, "down", self._transfers)
        transfers.append(replace(self._transfers[0], client=client))
        return replace(self._arrived, tensors=dict(self._arrived.tensors))


def the_very_same(one: Message, other: Message) -> bool:
    """Whether two messages hold the same tensor objects, so that one encoding serves both."""
    same = one.base is other.base and one.scalars == other.scalars and one.tensors.keys() == other.tensors.keys()
    return same and all(value is other.tensors[name] for name, value in one.tensors.items())
