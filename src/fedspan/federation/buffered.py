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

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from fedspan.errors import FedspanError
from fedspan.federation.aggregation.aggregation import Aggregation, AggregationFactory
from fedspan.federation.aggregation.reply_buffer import ReplyBuffer
from fedspan.federation.arrival_sources import (
    Arrival,
    ArrivalSource,
    NodeArrivals,
    OnOrder,
    RecordedArrivals,
    SimulatedArrivals,
)
from fedspan.federation.plausibility import drop_impossible_losses
from fedspan.federation.progress import Failure, OpenOrder, OpenOrders, Progress, RoundResult
from fedspan.federation.protocol import ClientLostState, Envelope, OrderEncoder, open_reply
from fedspan.federation.round import OnClient, OnFailure, build_too_few_error, compute_mean_loss, create_order_transfer
from fedspan.federation.round_context import RoundContext, Tally
from fedspan.federation.transport import AsynchronousTransport, Orders, TimedTransport

__all__ = ["BufferedRound"]


class BufferedRound:
    """One asynchronous round: it ends after as many valid replies as a synchronous round has clients.

    Whether a reply is valid decides only how many further replies the round takes. In a simulation and a replay the
    clients' order of arrival is known before any of them trains, so they train when their replies arrive, as many at
    once as started from one state. Clients on machines of their own train from the order to the reply. A replay takes
    the recorded replies, which were accepted, without comparing their norms again.

    Args:
        context: Definition of the round, without a cohort.
        new_aggregation: Creates the round's aggregation.
        progress: The progress before the round.
        best: Round of the stored state of each client at the best progress so far.
        on_client: Called with a client's id and training loss when its reply arrives.
        on_failure: Called with a client's id and a reason when its reply does not arrive, or is rejected.
        on_order: Called with each client that has an order, or receives one.

    Raises:
        FedspanError: If the transport cannot run asynchronous rounds, or recorded arrivals do not fit the federation.
    """

    def __init__(
        self,
        context: RoundContext,
        new_aggregation: AggregationFactory,
        progress: Progress,
        best: Mapping[str, int],
        on_client: OnClient | None = None,
        on_failure: OnFailure | None = None,
        on_order: OnOrder | None = None,
    ) -> None:
        assert context.settings.buffered is not None
        self._settings, self._start = context.settings.buffered, progress.open
        if self._settings.arrivals is not None:  # accepted ones: without the rejected ones the median is another
            context = replace(context, rules=replace(context.rules, norm_factor=None))
        self.context, self._new_aggregation, self._best = context, new_aggregation, best
        self._on_client, self._on_failure = on_client or (lambda *_: None), on_failure or (lambda *_: None)
        self._on_order = on_order or (lambda _: None)
        self._failed = set[str]()
        """The clients whose replies do not count, by what is known in this attempt."""
        self._last_rounds, self._last_replies = dict(progress.last_rounds), dict(progress.last_replies)
        self._states = {**progress.open.states, context.state.round: context.state}
        self.note: str | None = None
        """A note on the round for the user, available when it has run; None: no note."""
        self._replies: dict[str, tuple[OpenOrder, Envelope | str]] = {}
        self._bodies = ReplyBuffer()
        self._tally = Tally()
        self._encoder = OrderEncoder(context.run)
        self._created = set[int]()
        self._source = self._create_source(progress.open)

    def _create_source(self, open: OpenOrders) -> ArrivalSource:
        context, transport = self.context, self.context.transport
        if isinstance(transport, AsynchronousTransport) and self._settings.arrivals is None:
            limits = self._new_aggregation(context, Tally())
            return NodeArrivals(
                context,
                transport,
                open,
                self._create_order,
                lambda id: limits.compute_reply_bytes(context.clients[id].client),
                self._on_order,
            )
        if not isinstance(transport, TimedTransport):
            problem = (
                "asynchronous rounds run in the simulator (engine.name: batched or loop) and in deployments, and "
                "recorded ones in the simulator"
            )
            raise FedspanError("federation.buffered", type(transport).__name__, problem=problem)
        if self._settings.arrivals is not None:
            return RecordedArrivals(context, self._settings, self._states.keys(), self._on_order)
        return SimulatedArrivals(context, transport, open, self._on_order)

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
            if missing > 0 and self._take(missing, attempt):
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
            self._forget_lost()
            self._tally.transfers += [transfer for transfer in tally.transfers if transfer.client in failed]
            for id in failed:
                del self._replies[id]
            self._failed -= failed
            self._source.release(failed)

    def _take(self, count: int, attempt: int) -> int:
        """Take further replies, and return their number, which is below ``count`` only if there are no more."""
        taken = 0
        while taken < count and (arrivals := self._source.take(count - taken, attempt)):
            self._receive(arrivals)
            taken += len(arrivals)
        return taken

    def _receive(self, arrivals: Sequence[Arrival]) -> None:
        """Store the replies that have arrived; where clients train only now, those of one state train together."""
        context, by_round = self.context, dict[int, dict[str, OpenOrder]]()
        limit = self._settings.max_staleness
        for order, reply in arrivals:
            staleness = context.state.round - order.round
            if isinstance(reply, str):
                self._store_reply(order, reply)
            elif limit is not None and staleness > limit:
                reason = f"its order is {staleness} rounds old, and federation.buffered.max_staleness is {limit}"
                self._store_reply(order, reason)
            elif reply is not None:
                self._store_reply(order, reply)
            else:
                by_round.setdefault(order.round, {})[order.client] = order
                self._replies[order.client] = order, ""  # holds its place in the order of arrival
        for _, together in sorted(by_round.items()):

            def receive(id: str, reply: Envelope | str, orders: Mapping[str, OpenOrder] = together) -> None:
                self._store_reply(orders[id], reply)

            def create(id: str, orders: Mapping[str, OpenOrder] = together) -> Envelope:
                return self._create_order(orders[id])

            assert isinstance(context.transport, TimedTransport)
            context.transport.carry_out(Orders("train", together, create), list(together), receive)

    def _store_reply(self, order: OpenOrder, reply: Envelope | str) -> None:
        """Store a reply, or the reason why there is none, and report it."""
        try:
            decoded = open_reply(reply)
        except ValueError as error:
            self._report_failure(order.client, str(error))
        else:
            self._on_client(order.client, decoded.parts[-1].loss if decoded.parts else float("nan"))
        if isinstance(reply, Envelope):
            self._bodies.store(order.client, reply.body)
            reply = replace(reply, body=b"")
        self._replies[order.client] = order, reply

    def _create_order(self, order: OpenOrder) -> Envelope:
        context, state, id = self.context, self._states[order.round], order.client
        client = replace(context.clients[id].client, last_round=self._last_rounds.get(id))
        message = context.method.sync(state, client)
        encoded = self._encoder.order("train", state.round, id, client, message)
        if order.number not in self._created:  # a transport may make an order again that was refused on its way
            self._created.add(order.number)
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
                self._report_failure(id, str(error))
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
        self._tally.lost |= tally.lost
        self._forget_lost()
        memories, optimizers = context.transport.accept_replies(replies)
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
            simulated_seconds=open.clock - self._start.clock if isinstance(self._source, SimulatedArrivals) else None,
            clipped=dict(sorted(aggregation.clipped.items())),
            lowered=dict(sorted(aggregation.lowered.items())),
            arrivals=self._list_arrivals(replies),
        )

    def _list_arrivals(self, accepted: Collection[str]) -> tuple[tuple[str, int], ...]:
        """Return the accepted replies in their order of arrival, each with the age of its order in rounds."""
        round = self.context.state.round
        return tuple((id, round - order.round) for id, (order, _) in self._replies.items() if id in accepted)

    def _report_failure(self, id: str, reason: str) -> None:
        if id not in self._failed:  # else it was reported when it arrived, or when the replies were added up before
            self._failed.add(id)
            self._on_failure(id, reason)

    def _forget_lost(self) -> None:
        """Record for the clients that lost what they stored that their next order needs a complete message."""
        for id in self._tally.lost & self._last_rounds.keys():
            self._last_replies[id] = self._last_rounds.pop(id)
