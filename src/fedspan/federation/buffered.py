"""Asynchronous rounds (FedBuff): the server never waits for a slow client.

Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022, arXiv:2106.06639.

    M clients train at any time; as soon as one replies, another one is sent the current state
    after K replies:  x <- x + sum_i p_i s(t_i) (x_i - x'_i),   s(t) = (1 + t)^-a

``x'_i`` is the state that client i was sent, t_i the number of rounds since, and p_i its share of the weights of the K
replies. A round is one update, so all that counts in rounds counts updates. With K = M = all clients and equal speeds
it is a synchronous round.

Deviations: the paper samples clients with replacement. Here a client receives its next order after the round in which
its reply arrived, so that no round has two replies of one client. The paper's clients weigh alike
(``federation.weights: uniform``), and its server learning rate is a wrapper's (``fedavgm`` and the like).
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from fedspan.core.tensors import create_generator
from fedspan.core.values import ServerState
from fedspan.errors import FedspanError
from fedspan.federation.aggregation.aggregation import Aggregation, AggregationFactory, RoundContext, Tally
from fedspan.federation.aggregation.reply_buffer import ReplyBuffer
from fedspan.federation.plausibility import drop_impossible_losses
from fedspan.federation.progress import Failure, OpenOrder, OpenOrders, Progress, RoundResult
from fedspan.federation.protocol import (
    ClientLostState,
    Envelope,
    OrderEncoder,
    Orders,
    TimedTransport,
    open_reply,
)
from fedspan.federation.round import OnClient, build_too_few_error, compute_mean_loss, create_order_transfer
from fedspan.federation.settings import BufferedSettings

__all__ = ["BufferedRound"]


class _Source(Protocol):
    """The orders of a round in the order in which their replies arrive."""

    def take(self, count: int, attempt: int) -> list[OpenOrder]:
        """Return the next orders whose replies arrive; fewer than ``count`` if there are no more."""
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


class _SimulatedArrivals:
    """Arrivals by the simulated clock, which depend on the clients' speeds and on no training.

    Args:
        context: The round.
        transport: Knows how long each client takes.
        open: The orders that were sent before the round.
    """

    def __init__(self, context: RoundContext, transport: TimedTransport, open: OpenOrders) -> None:
        assert context.settings.buffered is not None
        self._context, self._transport = context, transport
        self._concurrency = context.settings.buffered.concurrency
        self._ids = tuple(context.clients)
        self._open = {order.client: order for order in open.orders}
        self._arrived = set[str]()
        self._number, self._clock = open.number, open.clock

    def take(self, count: int, attempt: int) -> list[OpenOrder]:
        orders = list[OpenOrder]()
        while len(orders) < count:
            self._send(attempt)  # not after the last reply: the next order is of the state that it updates
            if not self._open:
                break
            order = min(self._open.values(), key=lambda order: (order.arrival, order.number))
            del self._open[order.client]
            self._arrived.add(order.client)
            self._clock = order.arrival
            orders.append(order)
        return orders

    def release(self, ids: Collection[str]) -> None:
        self._arrived.difference_update(ids)

    def close(self, states: Mapping[int, ServerState]) -> OpenOrders:
        orders, context = tuple(self._open.values()), self._context
        assert context.settings.buffered is not None
        limit = context.settings.buffered.max_staleness
        oldest = 0 if limit is None else context.state.round + 1 - limit  # replies to older orders will not count
        needed = {order.round: states[order.round] for order in orders if order.round >= oldest}
        return OpenOrders(orders, self._number, self._clock, needed)

    def _send(self, attempt: int) -> None:
        """Send the current state to further clients, as long as fewer than the requested number train."""
        context = self._context
        while len(self._open) < self._concurrency and len(self._open) + len(self._arrived) < len(self._ids):
            id, round = self._draw_client(), context.state.round
            seconds, absence = self._transport.time_reply(id, round, attempt, context.rules.deadline)
            self._open[id] = OpenOrder(id, round, attempt, self._number, self._clock + seconds, absence)
            self._number += 1

    def _draw_client(self) -> str:
        """Draw a client that neither trains nor has replied in this round; from (seed, number of the order) alone."""
        busy = sorted(bisect.bisect_left(self._ids, id) for id in {*self._open, *self._arrived})
        rng = create_generator(self._context.settings.seed, "asynchronous order", self._number)
        position = int(torch.randint(len(self._ids) - len(busy), (), generator=rng))
        for taken in busy:
            position += taken <= position
        return self._ids[position]


class _RecordedArrivals:
    """Arrivals of an earlier run.

    Args:
        context: The round.
        settings: Settings with the recorded arrivals.
        states: The states of the server up to this round, by round.

    Raises:
        FedspanError: If the record does not fit the federation.
    """

    def __init__(self, context: RoundContext, settings: BufferedSettings, states: Collection[int]) -> None:
        assert settings.arrivals is not None
        number = context.state.round
        if number >= len(settings.arrivals):
            problem = f"the record has the arrivals of {len(settings.arrivals)} rounds, and this is round {number + 1}"
            raise FedspanError("federation.buffered.replay", len(settings.arrivals), problem=problem)
        self._later = settings.arrivals[number + 1 :]
        self._orders: list[OpenOrder] = []
        for position, (id, round) in enumerate(settings.arrivals[number]):
            if id not in context.clients or round not in states:
                problem = (
                    f"the record of round {number + 1} has a reply of {id!r} to round {round + 1}, which this run lacks"
                )
                raise FedspanError("federation.buffered.replay", id, problem=problem)
            self._orders.append(OpenOrder(id, round, 0, position, 0.0))

    def take(self, count: int, attempt: int) -> list[OpenOrder]:
        taken, self._orders = self._orders[:count], self._orders[count:]
        return taken

    def release(self, ids: Collection[str]) -> None:
        pass  # the record has no further replies of the round

    def close(self, states: Mapping[int, ServerState]) -> OpenOrders:
        needed = {round for arrivals in self._later for _, round in arrivals}
        return OpenOrders(states={round: state for round, state in states.items() if round in needed})


class BufferedRound:
    """One asynchronous round: it ends after as many valid replies as a synchronous round has clients.

    Whether a reply is valid decides only how many further replies the round takes; the clients' order of arrival is
    known before any of them trains. So they train when their replies arrive, as many at once as started from one state.

    Args:
        context: Definition of the round, without a cohort.
        new_aggregation: Creates the round's aggregation.
        progress: The progress before the round.
        best: Round of the stored state of each client at the best progress so far.
        on_client: Called with a client's id and training loss when its reply arrives.

    Raises:
        FedspanError: If recorded arrivals do not fit the federation.
    """

    def __init__(
        self,
        context: RoundContext,
        new_aggregation: AggregationFactory,
        progress: Progress,
        best: Mapping[str, int],
        on_client: OnClient | None = None,
    ) -> None:
        assert context.settings.buffered is not None
        if not isinstance(context.transport, TimedTransport):
            problem = "asynchronous rounds run in the simulator only (engine.name: batched or loop)"
            raise FedspanError("federation.buffered", type(context.transport).__name__, problem=problem)
        self.context, self.on_client, self._new_aggregation, self._best = context, on_client, new_aggregation, best
        self._settings, self._transport, self._start = context.settings.buffered, context.transport, progress.open
        self._last_rounds, self._last_replies = dict(progress.last_rounds), dict(progress.last_replies)
        self._states = {**progress.open.states, context.state.round: context.state}
        self._source: _Source = (
            _SimulatedArrivals(context, self._transport, progress.open)
            if self._settings.arrivals is None
            else _RecordedArrivals(context, self._settings, self._states.keys())
        )
        self.note: str | None = None
        """A note on the round for the user, available when it has run; None: no note."""
        self._replies: dict[str, tuple[OpenOrder, Envelope | str]] = {}
        self._bodies = ReplyBuffer()
        self._tally = Tally()
        self._encoder = OrderEncoder(context.run)

    def run(self) -> RoundResult:
        """Run the round.

        Raises:
            TooFewReplies: If too few replies are accepted after all attempts.
        """
        attempt = 0
        while True:
            aggregation, tally = self._aggregate()
            counted = aggregation.get_counted()
            missing = self.context.target - len(counted)
            orders = self._source.take(missing, attempt) if missing > 0 else []
            if orders:
                self._train(orders)
                continue
            if len(counted) >= aggregation.quorum:
                return self._build_result(aggregation, tally)
            if attempt == self.context.rules.retries or self._settings.arrivals is not None:
                context, failures = self._build_context(), [*self._tally.failures, *tally.failures]
                raise build_too_few_error(context, counted, failures, aggregation.quorum)
            attempt += 1
            failed = self._replies.keys() - set(counted)
            self._tally.failures += tally.failures
            self._tally.lost |= tally.lost
            self._tally.transfers += [transfer for transfer in tally.transfers if transfer.client in failed]
            for id in failed:
                del self._replies[id]
            self._source.release(failed)

    def _train(self, orders: Sequence[OpenOrder]) -> None:
        """Have the clients train whose replies arrive, those that started from one state together."""
        context, by_round = self.context, dict[int, dict[str, OpenOrder]]()
        limit = self._settings.max_staleness
        for order in orders:
            staleness = context.state.round - order.round
            if order.absence is not None:
                self._replies[order.client] = order, order.absence
            elif limit is not None and staleness > limit:
                reason = f"its order is {staleness} rounds old, and federation.buffered.max_staleness is {limit}"
                self._replies[order.client] = order, reason
            else:
                by_round.setdefault(order.round, {})[order.client] = order
                self._replies[order.client] = order, ""  # holds its place in the order of arrival
        for _, together in sorted(by_round.items()):

            def receive(id: str, reply: Envelope | str, orders: Mapping[str, OpenOrder] = together) -> None:
                if isinstance(reply, Envelope):
                    self._bodies.store(id, reply.body)
                    reply = replace(reply, body=b"")
                self._replies[id] = orders[id], reply

            def create(id: str, orders: Mapping[str, OpenOrder] = together) -> Envelope:
                return self._create_order(orders[id])

            self._transport.carry_out(Orders("train", together, create), list(together), receive)

    def _create_order(self, order: OpenOrder) -> Envelope:
        context, state, id = self.context, self._states[order.round], order.client
        client = replace(context.clients[id].client, last_round=self._last_rounds.get(id))
        message = context.method.sync(state, client)
        encoded = self._encoder.order("train", state.round, id, client, message)
        self._tally.transfers.append(create_order_transfer(id, encoded.body, message))
        lr = context.training.compute_lr(state.round, context.settings.rounds)
        return replace(encoded, attempt=order.attempt, lr=lr, best=self._best.get(id)).to_envelope()

    def _build_context(self) -> RoundContext:
        """Return the definition of the round, with the clients whose replies have arrived as its cohort."""
        sent = {
            id: self._states[order.round] for id, (order, _) in self._replies.items() if order.round in self._states
        }
        return replace(self.context, ids=tuple(sorted(self._replies)), draw_order=tuple(self._replies), sent=sent)

    def _aggregate(self) -> tuple[Aggregation, Tally]:
        """Aggregate the replies that have arrived so far; the aggregation is not closed."""
        context, tally = self._build_context(), Tally()
        aggregation = self._new_aggregation(context, tally)
        clients = {
            id: replace(context.clients[id].client, last_round=self._last_rounds.get(id)) for id in context.draw_order
        }
        aggregation.open(clients, 0)
        for id, (order, reply) in self._replies.items():
            try:
                envelope = replace(reply, body=self._bodies.load(id)) if isinstance(reply, Envelope) else reply
                decoded = open_reply(envelope)
                aggregation.add(clients[id], decoded, order.attempt)
            except ValueError as error:
                tally.failures.append(Failure(id, order.attempt, str(error)))
                if isinstance(error, ClientLostState):
                    tally.lost.add(id)
        return aggregation, tally

    def _build_result(self, aggregation: Aggregation, tally: Tally) -> RoundResult:
        """Close the aggregation, and return the result of the round."""
        context, state = self.context, self.context.state
        reduced = aggregation.close(0)
        self.note = aggregation.get_note()
        replies = {id: aggregation.replies[id] for id in sorted(aggregation.replies)}
        self._bodies.close()
        reported = replies
        failures = [*self._tally.failures, *tally.failures]
        if context.rules.validate:
            reported, impossible = drop_impossible_losses(replies)
            failures += [Failure(id, self._replies[id][0].attempt, reason) for id, reason in impossible]
        for id in (self._tally.lost | tally.lost) & self._last_rounds.keys():
            self._last_replies[id] = self._last_rounds.pop(id)
        if self.on_client is not None:
            for id, reply in replies.items():
                self.on_client(id, reply.parts[-1].loss if reply.parts else float("nan"))
        memories, optimizers = self._transport.accept_replies(replies)
        open = self._source.close(self._states)
        collected = Tally([*self._tally.transfers, *tally.transfers], failures)
        return RoundResult(
            progress=Progress(
                state=context.method.update(state, reduced),
                memories=memories,
                last_rounds={**self._last_rounds, **{id: reply.round for id, reply in replies.items()}},
                optimizers=optimizers,
                last_replies={id: round for id, round in self._last_replies.items() if id not in replies},
                open=open,
            ),
            transfers=collected.sort_transfers(),
            cohort=tuple(sorted(self._replies)),
            lr=context.training.compute_lr(state.round, context.settings.rounds),
            loss=compute_mean_loss(reported.values(), context.settings.max_weight_ratio),
            failures=collected.sort_failures(),
            simulated_seconds=open.clock - self._start.clock if self._settings.arrivals is None else None,
            clipped=dict(sorted(aggregation.clipped.items())),
            lowered=dict(sorted(aggregation.lowered.items())),
            arrivals=tuple(
                (id, state.round - order.round)
                for id, (order, reply) in self._replies.items()
                if isinstance(reply, Envelope)
            ),
        )
