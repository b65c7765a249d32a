"""Transports for tests: clients in this process, behind the same orders and replies as on other machines."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping

from fedspan.federation.orders import OnReply, Orders, Transport
from fedspan.federation.protocol import Parcel

Replies = Iterator[tuple[str, Parcel | str]]


class ReplyingTransport(Transport):
    """A transport whose replies a generator yields; it is closed when enough are there."""

    def exchange(self, orders: Orders, on_reply: OnReply, seconds: float, *, patient: bool = False) -> None:
        for id, back in self.replies(orders, seconds, patient=patient):
            if on_reply(id, back):
                return

    @abstractmethod
    def replies(self, parcels: Mapping[str, Parcel], seconds: float, *, patient: bool = False) -> Replies:
        """Yield client ids with their replies, or with the reason why there is none."""


def exchanged(
    transport: Transport, parcels: Mapping[str, Parcel], seconds: float, *, patient: bool = False, enough: int = -1
) -> dict[str, Parcel | str]:
    """Send parcels and collect the replies, or the first ``enough`` of them."""
    back: dict[str, Parcel | str] = {}

    def replied(id: str, reply: Parcel | str) -> bool:
        back[id] = reply
        return len(back) == enough

    transport.exchange(Orders("train", parcels, parcels.__getitem__), replied, seconds, patient=patient)
    return back
