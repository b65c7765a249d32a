"""Transports for tests: clients in this process, behind the same orders and replies as on other machines."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping

from fedspan.federation.protocol import Envelope
from fedspan.federation.transport import OnReply, Orders, Transport

Replies = Iterator[tuple[str, Envelope | str]]


class ReplyingTransport(Transport):
    """A transport whose replies a generator yields; it is closed when enough are there."""

    def exchange(self, orders: Orders, on_reply: OnReply, seconds: float, *, wait_for_offline: bool = False) -> None:
        for id, back in self.replies(orders, seconds, wait_for_offline=wait_for_offline):
            if on_reply(id, back):
                return

    @abstractmethod
    def replies(self, envelopes: Mapping[str, Envelope], seconds: float, *, wait_for_offline: bool = False) -> Replies:
        """Yield client ids with their replies, or with the reason why there is none."""


def exchanged(
    transport: Transport,
    envelopes: Mapping[str, Envelope],
    seconds: float,
    *,
    wait_for_offline: bool = False,
    enough: int = -1,
) -> dict[str, Envelope | str]:
    """Send envelopes and collect the replies, or the first ``enough`` of them."""
    back: dict[str, Envelope | str] = {}

    def replied(id: str, reply: Envelope | str) -> bool:
        back[id] = reply
        return len(back) == enough

    transport.exchange(
        Orders("train", envelopes, envelopes.__getitem__), replied, seconds, wait_for_offline=wait_for_offline
    )
    return back
