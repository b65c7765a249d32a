"""Sources of the replies of asynchronous rounds: a simulated clock, the record of a run, or machines.

Each source yields the orders of a round in the order in which their replies arrive, and decides when clients receive
further ones.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple, Protocol

import torch

from fedspan.core.tensors import create_generator
from fedspan.core.values import ServerState
from fedspan.errors import FedspanError
from fedspan.federation.config import Arrivals
from fedspan.federation.progress import OpenOrder, OpenOrders
from fedspan.federation.protocol import Envelope
from fedspan.federation.round_context import RoundContext
from fedspan.federation.transport import AsynchronousTransport, Orders, TimedTransport

OnOrder = Callable[[str], object]
"""Takes the id of a client that has an order, or receives one."""


class Arrival(NamedTuple):
    """The end of an order."""

    order: OpenOrder
    reply: Envelope | str | None
    """The client's reply, or the reason why there is none; None: the client trains now that its reply is due."""


class ArrivalSource(Protocol):
    """The orders of a round in the order in which their replies arrive."""

    def take(self, count: int, attempt: int) -> list[Arrival]:
        """Return the next orders whose replies arrive, ``count`` at most; none if there are no more."""
        ...

    def release(self, ids: Collection[str]) -> None:
        """Let clients whose replies did not count receive another order in the round."""
        ...

    def close(self, states: Mapping[int, ServerState]) -> OpenOrders:
        """Return what the next round continues from.

        Args:
            states: The states of the server up to this round, by round, as far as orders belong to them.
        """
        ...


class _TrainingClients:
    """The clients that train, and those that have replied in the round."""

    def __init__(self, context: RoundContext, orders: Iterable[OpenOrder], number: int, on_order: OnOrder) -> None:
        assert context.settings.buffered is not None
        self._context, self._settings = context, context.settings.buffered
        self._ids = tuple(context.clients)
        self._arrived = set[str]()
        self.open = {order.client: order for order in orders}
        self.number, self._on_order = number, on_order
        for id in self.open:
            on_order(id)

    def has_room(self, stalled: Collection[str] = ()) -> bool:
        """Return whether fewer clients than the requested number train, and another one can.

        Args:
            stalled: Clients that do not count as training although they have an order.
        """
        training = sum(id not in stalled for id in self.open)
        return training < self._settings.concurrency and len(self.open) + len(self._arrived) < len(self._ids)

    def draw_client(self) -> str:
        """Draw a client that neither trains nor has replied in this round; from (seed, number of the order) alone."""
        busy = sorted(bisect.bisect_left(self._ids, id) for id in {*self.open, *self._arrived})
        rng = create_generator(self._context.settings.seed, "asynchronous order", self.number)
        position = int(torch.randint(len(self._ids) - len(busy), (), generator=rng))
        for taken in busy:
            position += taken <= position
        return self._ids[position]

    def add_order(self, id: str, attempt: int, arrival: float = 0.0, absence: str | None = None) -> OpenOrder:
        order = OpenOrder(id, self._context.state.round, attempt, self.number, arrival, absence)
        self.open[id] = order
        self.number += 1
        self._on_order(id)
        return order

    def end_order(self, id: str) -> OpenOrder:
        """Return the order of a client whose reply has arrived; it receives no other one in the round."""
        self._arrived.add(id)
        return self.open.pop(id)

    def release(self, ids: Collection[str]) -> None:
        self._arrived.difference_update(ids)

    def close(self, states: Mapping[int, ServerState], clock: float = 0.0) -> OpenOrders:
        orders, limit = tuple(self.open.values()), self._settings.max_staleness
        oldest = 0 if limit is None else self._context.state.round + 1 - limit  # older orders' replies will not count
        needed = {order.round: states[order.round] for order in orders if order.round >= oldest}
        return OpenOrders(orders, self.number, clock, needed)


class SimulatedArrivals:
    """Arrivals by the simulated clock, which depend on the clients' speeds and on no training."""

    def __init__(
        self, context: RoundContext, transport: TimedTransport, open: OpenOrders, on_order: OnOrder = lambda _: None
    ) -> None:
        self._context, self._transport = context, transport
        self._clients = _TrainingClients(context, open.orders, open.number, on_order)
        self._clock = open.clock

    def take(self, count: int, attempt: int) -> list[Arrival]:
        arrivals, clients = list[Arrival](), self._clients
        while len(arrivals) < count:
            self._send(attempt)  # not after the last reply: the next order is of the state that it updates
            if not clients.open:
                break
            order = min(clients.open.values(), key=lambda order: (order.arrival, order.number))
            clients.end_order(order.client)
            self._clock = order.arrival
            arrivals.append(Arrival(order, order.absence))
        return arrivals

    def release(self, ids: Collection[str]) -> None:
        self._clients.release(ids)

    def close(self, states: Mapping[int, ServerState]) -> OpenOrders:
        return self._clients.close(states, self._clock)

    def _send(self, attempt: int) -> None:
        """Send the current state to further clients, as long as fewer than the requested number train."""
        context, clients = self._context, self._clients
        while clients.has_room():
            id = clients.draw_client()
            seconds, absence = self._transport.time_reply(id, context.state.round, attempt, context.settings.deadline)
            clients.add_order(id, attempt, self._clock + seconds, absence)


class NodeArrivals:
    """Arrivals from the clients' own machines, which train while the server does other things.

    An order that the transport no longer has open is lost with the server that sent it: its client may receive another,
    but may train for the first one still. An order that is too old to count is closed, and its client fails.

    Args:
        compute_reply_bytes: Returns the maximum size of the body of a client's reply, in bytes.
    """

    def __init__(
        self,
        context: RoundContext,
        transport: AsynchronousTransport,
        open: OpenOrders,
        create_order: Callable[[OpenOrder], Envelope],
        compute_reply_bytes: Callable[[str], int],
        on_order: OnOrder = lambda _: None,
    ) -> None:
        self._context, self._transport = context, transport
        self._create_order, self._compute_reply_bytes = create_order, compute_reply_bytes
        assert context.settings.buffered is not None
        limit = context.settings.buffered.max_staleness
        too_old = [order for order in open.orders if limit is not None and context.state.round - order.round > limit]
        retained = transport.retain_orders([order.client for order in open.orders if order not in too_old])
        transport.assume_training([order.client for order in open.orders if order.client not in retained])
        orders = [order for order in open.orders if order.client in retained or order in too_old]
        self._clients = _TrainingClients(context, orders, open.number, on_order)
        self._too_old = [Arrival(self._clients.end_order(order.client), None) for order in too_old]

    def take(self, count: int, attempt: int) -> list[Arrival]:
        """``ArrivalSource.take``; a reply is returned as soon as it arrives."""
        arrivals, self._too_old = self._too_old, list[Arrival]()
        if not arrivals and count > 0:
            self._send(attempt)  # not after the last reply: the next order is of the state that it updates
            received = self._transport.receive_reply()
            if received is not None:
                id, reply = received
                arrivals.append(Arrival(self._clients.end_order(id), reply))
        return arrivals

    def release(self, ids: Collection[str]) -> None:
        self._clients.release(ids)

    def close(self, states: Mapping[int, ServerState]) -> OpenOrders:
        """``ArrivalSource.close``; an order that has not reached its client by now is not sent any more."""
        retained = self._transport.retain_orders(self._clients.open)
        for id in self._clients.open.keys() - retained:
            del self._clients.open[id]
        return self._clients.close(states)

    def _send(self, attempt: int) -> None:
        """Send the current state to further clients, as long as fewer than the requested number train.

        Clients that are offline, or were silent until their last deadline, receive orders but do not count.
        """
        while sent := self._add_orders(attempt):
            orders = Orders(
                "train", sent, lambda id, sent=sent: self._create_order(sent[id]), self._compute_reply_bytes
            )
            deadline = self._context.settings.deadline
            self._transport.send_orders(orders, deadline, wait_for_offline=attempt > 0)

    def _add_orders(self, attempt: int) -> dict[str, OpenOrder]:
        clients, sent, stalled = self._clients, dict[str, OpenOrder](), self._transport.list_stalled()
        while clients.has_room(stalled):
            id = clients.draw_client()
            sent[id] = clients.add_order(id, attempt)
        return sent


class RecordedArrivals:
    """Arrivals of an earlier run."""

    def __init__(
        self,
        context: RoundContext,
        arrivals: Arrivals,
        states: Collection[int],
        on_order: OnOrder = lambda _: None,
    ) -> None:
        number = context.state.round
        if number >= len(arrivals):
            problem = f"the record has the arrivals of {len(arrivals)} rounds, and this is round {number + 1}"
            raise FedspanError("federation.buffered.replay", len(arrivals), problem=problem)
        if len(arrivals[number]) > context.target:
            problem = f"the record of round {number + 1} has more replies than a round takes ({context.target})"
            raise FedspanError("federation.buffered.replay", len(arrivals[number]), problem=problem)
        self._later = arrivals[number + 1 :]
        self._orders: list[OpenOrder] = []
        for position, (id, round) in enumerate(arrivals[number]):
            if id not in context.clients or round not in states:
                problem = (
                    f"the record of round {number + 1} has a reply of {id!r} to round {round + 1}, which this run lacks"
                )
                raise FedspanError("federation.buffered.replay", id, problem=problem)
            self._orders.append(OpenOrder(id, round, 0, position, 0.0))
            on_order(id)

    def take(self, count: int, attempt: int) -> list[Arrival]:
        taken, self._orders = self._orders[:count], self._orders[count:]
        return [Arrival(order, None) for order in taken]

    def release(self, ids: Collection[str]) -> None:
        """``ArrivalSource.release``; the record has no further replies of the round."""

    def close(self, states: Mapping[int, ServerState]) -> OpenOrders:
        needed = {round for arrivals in self._later for _, round in arrivals}
        return OpenOrders(states={round: state for round, state in states.items() if round in needed})
