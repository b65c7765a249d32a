"""One synchronous round of a federation: attempts with deadlines, until enough of a cohort's replies are aggregated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from fedspan.core.values import Client, Reduced
from fedspan.errors import FedspanError
from fedspan.federation.absences import Awaited
from fedspan.federation.aggregation.aggregation import AggregationFactory
from fedspan.federation.privacy import compute_expected_charges, compute_round_charges
from fedspan.federation.progress import Progress, RoundResult, TooFew
from fedspan.federation.protocol import Envelope, Masking
from fedspan.federation.round_context import RoundContext, Tally
from fedspan.federation.round_exchange import OnClient, OnFailure, RoundExchange
from fedspan.federation.second_exchange import build_second_context
from fedspan.federation.transport import Orders
from fedspan.training.accounting import Charge

OnCharge = Callable[[tuple[Charge, ...]], None]
"""Takes the privacy cost of an attempt before its orders are sent; an error that it raises ends the round."""


class Round:
    """One round, until it succeeds or fails.

    Args:
        progress: The progress before the round: what clients store, and when they last replied.
        best: Round of each client's last reply in the best progress so far; clients keep the state that belongs to it.
        on_client: Called with a client's id and training loss when its reply is accepted.
        on_charge: Called with the privacy cost of each attempt before its orders are sent.
        on_failure: Called with a client's id and a reason when its reply is rejected on arrival or does not arrive.
    """

    def __init__(
        self,
        context: RoundContext,
        new_aggregation: AggregationFactory,
        progress: Progress,
        best: Mapping[str, int],
        on_client: OnClient | None = None,
        on_charge: OnCharge | None = None,
        on_failure: OnFailure | None = None,
    ) -> None:
        self.context, self._new_aggregation, self._best = context, new_aggregation, best
        self._on_charge, self._on_failure = on_charge, on_failure
        self.tally = Tally()
        """The transfers and failures so far."""
        self.aggregation = new_aggregation(context, self.tally)
        self._exchange = RoundExchange(
            context, self.aggregation, self.tally, progress, best, on_client=on_client, on_failure=on_failure
        )

    def run(self) -> RoundResult:
        """Run the round; if too few replies are accepted, retry failed clients as often as the rules allow.

        Raises:
            FedspanError: If too few replies are accepted after all attempts.
        """
        reduced, attempt = self.reduce()
        missed = frozenset[str]()
        if self.context.method.declare_claims().second_exchange:
            reduced, missed = self._run_second_exchange(reduced)
        failed = {failure.client for failure in self.tally.failures if failure.attempt == attempt}
        late = [id for id in self.context.ids if id not in self.aggregation.replies and id not in failed]
        return replace(self._exchange.build_result(reduced, missed, attempt), late=tuple(late))

    def reduce(self) -> tuple[Reduced, int]:
        """Exchange orders and replies, and return the reduction and the number of the successful attempt, from 0.

        Raises:
            TooFewReplies: If too few replies are accepted after all attempts.
        """
        aggregation, exchange = self.aggregation, self._exchange
        for attempt in range(self.context.rules.retries + 1):
            clients = {id: exchange.get_client(id) for id in aggregation.get_missing()}
            try:
                self._train(aggregation.open(clients, attempt, exchange.encoder), attempt)
                reduced = aggregation.close(attempt)
            except TooFew:
                continue
            finally:
                exchange.forget_lost()
            return reduced, attempt
        raise exchange.build_error(aggregation.get_succeeded())

    def _run_second_exchange(self, first: Reduced) -> tuple[Reduced, frozenset[str]]:
        """Run the second exchange with the clients whose replies were accepted.

        Returns:
            Both reductions as one, and the clients that missed the second exchange: their next orders continue from the
            state before this round.

        Raises:
            TooFewReplies: If too few replies are accepted after all attempts.
            FedspanError: If the method names tensors of both replies alike.
        """
        context, aggregation = self.context, self.aggregation
        order = context.method.build_second_order(context.state, first)
        second = Round(
            build_second_context(context, order, aggregation.replies, aggregation.clipped),
            self._new_aggregation,
            Progress(context.state, last_rounds=self._exchange.last_rounds),
            self._best,
            on_failure=self._on_failure,
        )
        try:
            reduced, _ = second.reduce()
        finally:
            self.tally.extend(second.tally)
        self._exchange.forget_replied(second.tally.lost)
        if both := sorted(first.mean.keys() & reduced.mean.keys()):
            problem = f"both replies of {context.method.declare_claims().paper} have a tensor of this name"
            raise FedspanError("method", both[0], "other names in build_second_reply than in finish", problem=problem)
        missed = frozenset(aggregation.replies) - frozenset(second.aggregation.replies)
        return replace(first, mean={**first.mean, **reduced.mean}), missed

    def _train(self, masks: Mapping[str, Masking | None], attempt: int) -> None:
        """Order clients to train and aggregate their replies."""
        context, aggregation, exchange = self.context, self.aggregation, self._exchange
        costs = self._announce(masks, attempt)

        def order(id: str) -> Envelope:
            return exchange.create_order(id, context.state, attempt, masks[id], costs.get(id, ()))

        # All participants of a secure sum have already replied in this attempt, and a retry needs every client.
        absent = [] if attempt else [id for id in context.absent if id in masks and masks[id] is None]
        awaited = Awaited(masks, absent)

        def on_reply(id: str, reply: Envelope | str) -> bool:
            is_enough = exchange.take_reply(id, reply, attempt)
            return awaited.is_over(id, aggregation.get_counted, aggregation.quorum) or is_enough

        orders = Orders(context.task, masks, order, lambda id: aggregation.compute_reply_bytes(exchange.get_client(id)))
        context.transport.exchange(orders, on_reply, context.rules.deadline, wait_for_offline=attempt > 0)

    def _announce(self, ids: Iterable[str], attempt: int) -> Mapping[str, tuple[Charge, ...]]:
        """Return what an attempt's orders cost each client, after announcing it with what the round costs all."""
        context, privacy, exchange = self.context, self.context.settings.privacy, self._exchange
        if privacy is None:
            return {}
        shared = compute_round_charges(context.settings, len(context.clients)) if attempt == 0 else ()
        exchange.charges += shared
        clients = {} if context.settings.central is not None else {id: exchange.get_client(id) for id in ids}
        costs = compute_client_charges(context, clients)
        if self._on_charge is not None:
            self._on_charge((*shared, *(charge for client_costs in costs.values() for charge in client_costs)))
        return costs


def compute_client_charges(context: RoundContext, clients: Mapping[str, Client]) -> dict[str, tuple[Charge, ...]]:
    """Return the privacy cost of a training order for each client; it depends on rank and examples alone."""
    by_kind: dict[tuple[int, int], tuple[Charge, ...]] = {}
    charges: dict[str, tuple[Charge, ...]] = {}
    for id, client in clients.items():
        kind = (client.rank, client.examples)
        if kind not in by_kind:
            privacy, state = context.settings.privacy, context.state
            by_kind[kind] = compute_expected_charges(privacy, context.training, context.method, state, client)
        charges[id] = tuple(replace(charge, payer=id) for charge in by_kind[kind])
    return charges
