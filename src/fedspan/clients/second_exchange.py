"""The client half of a round's second exchange: what a client holds of the first one, and its reply from that alone.

It holds one training, whatever versions of its state there are: the next training replaces it, and an order of any
other kind deletes it. It replies to one message, however often that is sent: replies to two messages would reveal more
about the same training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from fedspan.clients.state_files import Kind
from fedspan.core.method import Method
from fedspan.core.tensors import Tensors
from fedspan.core.values import Client, Message
from fedspan.errors import FedspanError
from fedspan.federation.protocol import Order
from fedspan.federation.serialization import Reader, Writer, expect


@dataclass(frozen=True)
class FirstExchange:
    """What a client holds of a round's first exchange, for the second one alone.

    Args:
        tensors: The target layers' tensors, as trained, without the extras.
        factor: Factor by which the client scaled its change down for a secure sum.
        order: Digest of the second exchange's message that was answered; no other one is. Empty: none was yet.
    """

    tensors: Tensors
    factor: float = 1.0
    order: str = ""


def _write_trained(writer: Writer, first: FirstExchange) -> Mapping[str, object]:
    return {"tensors": writer.add_tensors(first.tensors), "factor": first.factor, "order": first.order}


def _read_trained(reader: Reader, structure: object) -> FirstExchange:
    return FirstExchange(
        reader.read_tensors(expect(structure, "tensors", dict)),
        expect(structure, "factor", float),
        expect(structure, "order", str),
    )


TRAINED: Kind[FirstExchange] = Kind("trained", _write_trained, _read_trained)


class FirstExchangeStore(Protocol):
    """What clients hold of first exchanges."""

    def load_trained(self, client: str, round: int) -> FirstExchange:
        """Load what a client trained in a round.

        Raises:
            LostStateError: If it is missing, damaged or of another round.
        """
        ...

    def store_trained(self, client: str, round: int, first: FirstExchange | None) -> None:
        """Replace what the client trained in any round; None: delete it."""
        ...


def build_second_reply(
    store: FirstExchangeStore, method: Method, order: Order, client: Client, message: Message
) -> tuple[Message, float]:
    """Build the reply to an order of a second exchange from what the client trained in the first.

    Returns:
        The reply, and the factor by which its change is scaled before it enters a secure sum.

    Raises:
        FedspanError: If the method has one exchange a round, the client answered for another message, or the message
            does not fit the method; ``LostStateError`` if it trained nothing in the round that is stored.
    """
    if not method.declare_claims().second_exchange:
        raise FedspanError("message.task", order.task, problem="a round of this method has one exchange")
    first, digest = store.load_trained(order.to, order.round), order.body_sha256.hex()
    if first.order not in ("", digest):
        problem = "this round's second exchange was answered for another message"
        raise FedspanError("message.tensors", order.task, problem=problem)
    reply = method.build_second_reply(message, first.tensors, client, order.round)
    if not first.order:
        store.store_trained(order.to, order.round, replace(first, order=digest))
    return reply, first.factor
