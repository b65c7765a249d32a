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

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedspan.errors import FedspanError
from fedspan.federation.aggregation.plaintext import PlaintextAggregation
from fedspan.federation.arrival_sources import (
    Arrival,
    ArrivalSource,
    NodeArrivals,
    OnOrder,
    RecordedArrivals,
    SimulatedArrivals,
)
from fedspan.federation.progress import OpenOrder, OpenOrders, Progress, RoundResult
from fedspan.federation.protocol import Envelope
from fedspan.federation.round import OnClient, OnFailure, RoundExchange
from fedspan.federation.round_context import RoundContext, Tally
from fedspan.federation.transport import AsynchronousTransport, Orders, TimedTransport


class BufferedRound:
    """One asynchronous round: it ends after as many valid replies as a synchronous round has clients.

    Whether a reply is valid decides only how many further replies the round takes. In a simulation and a replay the
    clients' order of arrival is known before any of them trains, so they train when their replies arrive, as many at
    once as started from one state. Clients on machines of their own train from the order to the reply. A replay takes
    the recorded replies, which were accepted, without comparing their norms again.

    Args:
        on_client: ``on_arrival`` of ``RoundExchange``, which has the other arguments, too.

    Raises:
        FedspanError: If the transport cannot run asynchronous rounds, or recorded arrivals do not fit the federation.
    """

    def __init__(
        self,
        context: RoundContext,
        progress: Progress,
        best: Mapping[str, int],
        on_client: OnClient | None = None,
        on_failure: OnFailure | None = None,
        on_order: OnOrder | None = None,
    ) -> None:
        assert context.settings.buffered is not None
        self._settings, self._arrivals = context.settings.buffered, context.settings.arrivals
        self._start = progress.open
        if self._arrivals is not None:  # accepted ones: without the rejected ones the median is another
            context = replace(context, settings=context.settings.model_copy(update={"max_norm_ratio": None}))
        self.context = context
        self._on_order = on_order or (lambda _: None)
        self._states = {**progress.open.states, context.state.round: context.state}
        self.note: str | None = None
        """A note on the round for the user, available when it has run; None: no note."""
        self._arrived: dict[str, OpenOrder] = {}
        """The orders of the clients whose replies have arrived in this attempt, in the order of arrival."""
        tally = Tally()
        self._aggregation = aggregation = PlaintextAggregation(context, tally)
        self._exchange = RoundExchange(
            context, aggregation, tally, progress, best, on_arrival=on_client, on_failure=on_failure
        )
        self._source = self._create_source(progress.open)

    def _create_source(self, open: OpenOrders) -> ArrivalSource:
        context, transport = self.context, self.context.transport
        if isinstance(transport, AsynchronousTransport) and self._arrivals is None:
            return NodeArrivals(
                context,
                transport,
                open,
                self._create_order,
                lambda id: self._aggregation.compute_reply_bytes(context.clients[id].client),
                self._on_order,
            )
        if not isinstance(transport, TimedTransport):
            problem = (
                "asynchronous rounds run in the simulator (engine.name: batched or loop) and in deployments, and "
                "recorded ones in the simulator"
            )
            raise FedspanError("federation.buffered", type(transport).__name__, problem=problem)
        if self._arrivals is not None:
            return RecordedArrivals(context, self._arrivals, self._states.keys(), self._on_order)
        return SimulatedArrivals(context, transport, open, self._on_order)

    def run(self) -> RoundResult:
        """Run the round.

        Raises:
            TooFewReplies: If too few replies are accepted after all attempts.
        """
        attempt, aggregation = 0, self._aggregation
        while True:
            counted = aggregation.get_counted()
            missing = self.context.target - len(counted)
            if missing > 0 and self._take(missing, attempt):
                continue
            if len(counted) >= aggregation.quorum:
                return self._build_result()
            if attempt == self.context.settings.retries or self._arrivals is not None:
                raise self._exchange.build_error(counted)
            attempt += 1
            failed = self._arrived.keys() - set(counted)
            self._exchange.forget_lost()
            for id in failed:
                del self._arrived[id]
            self._change_cohort()
            self._source.release(failed)

    def _take(self, count: int, attempt: int) -> int:
        """Take further replies, and return their number, which is below ``count`` only if there are no more."""
        taken = 0
        while taken < count and (arrivals := self._source.take(count - taken, attempt)):
            self._receive(arrivals)
            taken += len(arrivals)
        return taken

    def _receive(self, arrivals: Sequence[Arrival]) -> None:
        """Take the replies that have arrived; where clients train only now, those of one state train together."""
        context, by_round = self.context, dict[int, dict[str, OpenOrder]]()
        limit = self._settings.max_staleness
        self._arrived |= {order.client: order for order, _ in arrivals}
        self._change_cohort()
        for order, reply in arrivals:
            staleness = context.state.round - order.round
            if isinstance(reply, str):
                self._take_reply(order, reply)
            elif limit is not None and staleness > limit:
                reason = f"its order is {staleness} rounds old, and federation.buffered.max_staleness is {limit}"
                self._take_reply(order, reason)
            elif reply is not None:
                self._take_reply(order, reply)
            else:
                by_round.setdefault(order.round, {})[order.client] = order
        for _, together in sorted(by_round.items()):

            def receive(id: str, reply: Envelope | str, orders: Mapping[str, OpenOrder] = together) -> None:
                self._take_reply(orders[id], reply)

            def create(id: str, orders: Mapping[str, OpenOrder] = together) -> Envelope:
                return self._create_order(orders[id])

            assert isinstance(context.transport, TimedTransport)
            context.transport.carry_out(Orders("train", together, create), list(together), receive)

    def _take_reply(self, order: OpenOrder, reply: Envelope | str) -> None:
        self._exchange.take_reply(order.client, reply, order.attempt)

    def _create_order(self, order: OpenOrder) -> Envelope:
        return self._exchange.create_order(order.client, self._states[order.round], order.attempt)

    def _change_cohort(self) -> None:
        sent = {id: self._states[order.round] for id, order in self._arrived.items() if order.round in self._states}
        draw_order = tuple(self._arrived)
        context = replace(self.context, ids=tuple(sorted(draw_order)), draw_order=draw_order, sent=sent)
        self._exchange.context = context
        self._aggregation.change_cohort(context)

    def _build_result(self) -> RoundResult:
        reduced = self._aggregation.close(0)
        self.note = self._aggregation.get_note()
        self._exchange.forget_lost()
        open = self._source.close(self._states)
        result = self._exchange.build_result(reduced)
        round, accepted = self.context.state.round, self._aggregation.replies
        return replace(
            result,
            progress=replace(result.progress, open=open),
            simulated_seconds=open.clock - self._start.clock if isinstance(self._source, SimulatedArrivals) else None,
            arrivals=tuple((id, round - order.round) for id, order in self._arrived.items() if id in accepted),
        )
