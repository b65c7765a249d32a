"""Exchanges of a model outside the rounds: clients evaluate it, or export it, and train nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from fedspan.core.method import Method
from fedspan.core.values import Client, ServerState
from fedspan.federation.progress import Transfer
from fedspan.federation.protocol import Envelope, OrderEncoder, Reply, open_reply
from fedspan.federation.round_exchange import create_order_transfer
from fedspan.federation.transport import Orders, Transport


def exchange_model(
    task: Literal["evaluate", "export"],
    method: Method,
    state: ServerState,
    ids: Iterable[str],
    get_client: Callable[[str], Client | None],
    transport: Transport,
    *,
    run: str,
    seconds: float,
    on_order: Callable[[Transfer], None],
    on_reply: Callable[[str, Reply | str], bool],
) -> None:
    """Send clients a state's model, and pass on their replies.

    Args:
        task: What the clients do with the model.
        get_client: Returns the client whose own model is sent; None: the global one is.
        seconds: Time limit for the clients, in seconds.
        on_reply: Called with each client's reply, or the reason why there is none; returns whether enough replies have
            arrived.
    """
    encoder = OrderEncoder(run)

    def order(id: str) -> Envelope:
        client = get_client(id)
        message = method.sync(state, client)
        encoded = encoder.order(task, state.round, id, client, message)
        on_order(create_order_transfer(id, encoded.body, message, task))
        return encoded.to_envelope()

    def read(id: str, envelope: Envelope | str) -> Reply | str:
        try:
            reply = open_reply(envelope)
        except ValueError as error:
            return str(error)
        if (reply.task, reply.id, reply.round) != (task, id, state.round):
            return f"an answer of {reply.id!r} ({reply.task}) to round {reply.round + 1}"
        return reply

    orders = Orders(task, ids, order, lambda _: 0)
    transport.exchange(orders, lambda id, envelope: on_reply(id, read(id, envelope)), seconds)
