"""The transport of the simulator: one host in this process with all clients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fedspan.clients.host import Host
from fedspan.clients.refusals import refuse_any
from fedspan.clients.store import OverlayClientStore
from fedspan.core.method import Method
from fedspan.core.values import Message, ServerState
from fedspan.federation.aggregation.reduction import ReplyBuffer
from fedspan.federation.conditions import PHASES, Conditions, corrupt_reply
from fedspan.federation.config import RoundSettings
from fedspan.federation.federation import Federation, sort_clients
from fedspan.federation.presence import Presence
from fedspan.federation.progress import ClientData, ClientState, Progress
from fedspan.federation.protocol import Envelope, Order, Reply, decode_order
from fedspan.federation.secagg.messages import decode_phase
from fedspan.federation.second_exchange import SecondExchange
from fedspan.federation.transport import OnReply, OnTrained, Orders, TimedTransport
from fedspan.federation.validation import build_untrained_jobs, build_untrained_reply
from fedspan.tasks.task import Examples
from fedspan.training.engine import Engine

if TYPE_CHECKING:
    from fedspan.clients.secagg import SecureClient

_DROPPED_OUT = "it dropped out (simulated)"
"""Reason why a client that dropped out sends no reply."""


class _LazyOrders(Mapping[str, Order]):
    def __init__(self, orders: Orders, ids: Sequence[str]) -> None:
        self._orders, self._ids = orders, ids

    def __getitem__(self, id: str) -> Order:
        return decode_order(self._orders[id])

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)


class InProcess(TimedTransport):
    """Passes orders to a host in this process.

    An error in training stops the round: in a simulation it is a mistake in the run's settings.

    Args:
        conditions: Simulated conditions; None: every client replies at once.
    """

    def __init__(self, host: Host, conditions: Conditions | None = None) -> None:
        self.host, self.conditions = host, conditions
        self._state, self._attempt = ServerState(), -1
        self._clock = 0.0
        if conditions is not None and conditions.faults is not None:
            self._faulty, self._faults = conditions.draw_faulty(sorted(host.clients)), conditions.faults
            host.tamper = self._tamper

    def begin(self, progress: Progress, on_trained: OnTrained | None = None) -> None:
        self.host.store = OverlayClientStore(progress.states)
        self.host.on_trained = on_trained
        self.host.share_base(progress.state.base)
        self._state, self._attempt, self._clock = progress.state, -1, 0.0

    def accept_replies(self, accepted: Collection[str]) -> Mapping[str, ClientState]:
        assert isinstance(self.host.store, OverlayClientStore)
        return self.host.store.accept(accepted)

    def get_simulated_seconds(self) -> float | None:
        return None if self.conditions is None or self.conditions.speed is None else self._clock

    def exchange(self, orders: Orders, on_reply: OnReply, seconds: float, *, wait_for_offline: bool = False) -> None:
        responding, dropped = self._split_dropped(orders)
        for id in dropped:
            envelope = orders[id]  # creates the order, because the ledger counts it
            del envelope
            on_reply(id, _DROPPED_OUT)
        if orders.task == "train":
            self._train(orders, responding, on_reply, seconds, waits_for_dropped=bool(dropped))
            return
        if orders.task in ("statistics", "second", "evaluate"):
            is_over = [False]

            def pass_on(id: str, reply: Envelope | str) -> None:
                is_over[0] = on_reply(id, reply)

            self.carry_out(orders, responding, pass_on)
            if orders.task == "second" and dropped and not is_over[0]:
                self._clock += seconds  # until the deadline, for clients that do not reply
            return
        for id in responding:
            phase = decode_phase(orders[id])
            try:
                reply = self.host.reply(phase)
            except Exception as error:
                reply = refuse_any(phase, error)
            if on_reply(id, reply):
                return
        if dropped and self.get_simulated_seconds() is not None:
            self._clock += seconds  # of a secure sum: the server waits for clients that stopped replying

    def _split_dropped(self, orders: Orders) -> tuple[list[str], list[str]]:
        """Return the clients that reply in an exchange and the clients that do not."""
        phase = "train" if orders.task in ("statistics", "second") else orders.task
        if self.conditions is None or phase not in PHASES:
            return list(orders), []
        phases = ("train",) if self.host.secure is None else PHASES
        self._attempt += phase == phases[0]
        dropped: list[str] = []
        for id in orders:
            phase_of_dropout = self.conditions.draw_silence(id, self._state.round, self._attempt, phases)
            if phase_of_dropout is not None and phases.index(phase_of_dropout) <= phases.index(phase):
                dropped.append(id)
        dropped_ids = set(dropped)
        return [id for id in orders if id not in dropped_ids], dropped

    def _train(
        self, orders: Orders, responding: Sequence[str], on_reply: OnReply, seconds: float, waits_for_dropped: bool
    ) -> None:
        """Train the present clients and pass on their replies in the order of the simulated clock."""
        replies: dict[str, Envelope | str] = {}
        conditions = self.conditions
        if conditions is None or conditions.speed is None:
            # All replies arrive at once: the order in which the engine finishes clients has no effect.
            self.carry_out(orders, responding, on_reply)
            return
        times = {id: conditions.compute_seconds(id, self.host.count_examples(id)) for id in responding}
        in_time = [id for id in responding if times[id] <= seconds]
        for id in responding:
            if times[id] > seconds:
                envelope = orders[id]
                del envelope
        buffer = ReplyBuffer()  # holds replies until their time on the simulated clock

        def hold(id: str, reply: Envelope | str) -> None:
            if isinstance(reply, Envelope):
                buffer.store(id, reply.body)
                reply = replace(reply, body=b"")
            replies[id] = reply

        try:
            self.carry_out(orders, in_time, hold)
            for id in sorted(in_time, key=lambda id: (times[id], id)):
                reply = replies.pop(id)
                if isinstance(reply, Envelope):
                    reply = replace(reply, body=buffer.load(id))
                if on_reply(id, reply):
                    self._clock += times[id]
                    return
        finally:
            buffer.close()
        for id in responding:
            if times[id] > seconds:
                on_reply(id, _describe_lateness(times[id], seconds))
        all_replied = not waits_for_dropped and len(in_time) == len(responding)
        self._clock += max(times.values(), default=0.0) if all_replied else seconds

    def carry_out(self, orders: Orders, ids: Sequence[str], on_reply: Callable[[str, Envelope | str], object]) -> None:
        if orders.task == "train":

            def pass_on(reply: Reply) -> None:
                on_reply(reply.id, reply.to_envelope())

            self.host.train(_LazyOrders(orders, ids), pass_on)
            return
        if orders.task != "second":  # which uses no data
            self.host.prepare(ids)
        for id in ids:
            on_reply(id, self.host.answer(decode_order(orders[id])).to_envelope())

    def time_reply(self, id: str, round: int, attempt: int, seconds: float) -> tuple[float, str | None]:
        conditions = self.conditions
        if conditions is None:
            return 0.0, None
        if conditions.draw_silence(id, round, attempt, ("train",)) is not None:
            return seconds, _DROPPED_OUT
        time = conditions.compute_seconds(id, self.host.count_examples(id))
        return (seconds, _describe_lateness(time, seconds)) if time > seconds else (time, None)

    def _tamper(self, order: Order, order_message: Message, reply: Message) -> Message:
        """Return a client's reply; that of a faulty client is corrupted."""
        if order.to not in self._faulty:
            return reply
        assert order.client is not None
        assert self.conditions is not None
        memory = (
            {} if order.client.last_round is None else self.host.store.load(order.to, order.client.last_round).memory
        )
        if order.task == "second":
            exchange = SecondExchange(inner=self.host.method, order=order_message, state=self._state)
            start = build_untrained_reply(exchange, order_message, replace(order.client, last_round=None), order.round)
        else:
            start = build_untrained_jobs(self.host.method, order_message, order.client, order.round, memory)[1]
        return corrupt_reply(self._faults, reply, start, self.conditions.seed, order.round, order.to)


def _describe_lateness(time: float, seconds: float) -> str:
    """Return the reason why a client that takes longer than the time limit sends no reply."""
    return f"no reply within {seconds:g} s (simulated: {time:.3g} s)"


def simulate(
    method: Method,
    engine: Engine,
    clients: Sequence[ClientData] | Mapping[str, ClientData],
    examples: Examples,
    settings: RoundSettings,
    secure: Mapping[str, SecureClient] | None = None,
    conditions: Conditions | None = None,
    presence: Presence | None = None,
) -> Federation:
    """Create a federation whose clients are all in this process, on one host.

    Args:
        clients: The clients in any order, or by sorted id (``LazyMapping``).
        examples: The data set that the clients' indices refer to.
        secure: Each client's half of secure aggregation; None: the run has none.
        conditions: Simulated conditions; None: every client replies at once.
        presence: The rounds in which each client is present; None: every client in every round.
    """
    by_id = sort_clients(clients)
    transport = create_transport(method, engine, by_id, examples, secure, conditions)
    return Federation(method, engine, by_id, examples, settings, transport, presence=presence)


def create_transport(
    method: Method,
    engine: Engine,
    clients: Mapping[str, ClientData],
    examples: Examples,
    secure: Mapping[str, SecureClient] | None = None,
    conditions: Conditions | None = None,
) -> InProcess:
    """Create the host of all clients, which are by sorted id, and the transport to it (``simulate``)."""
    store = OverlayClientStore({})
    host = Host(method, engine, clients, examples, store, batch_size=1, secure=secure, reveals_losses=True)
    return InProcess(host, conditions)


def replace_clients(federation: Federation, clients: Mapping[str, ClientData]) -> Federation:
    """Return a federation in this process with other examples of its clients, on a host of its own.

    Args:
        federation: A federation that ``simulate`` created, without secure aggregation.
        clients: The same clients with other examples.
    """
    assert isinstance(federation.transport, InProcess)
    replaced = simulate(
        federation.method,
        federation.engine,
        clients,
        federation.examples,
        federation.settings,
        conditions=federation.transport.conditions,
        presence=federation.presence,
    )
    return replaced.replace_training(federation.training)
