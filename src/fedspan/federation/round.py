"""A round of a federation, and exchanges outside of the rounds.

When orders start, and when the update closes, is the schedule's: ``Round``, which has attempts with deadlines, or
``buffered.BufferedRound``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Literal

from fedspan.core.method import Method
from fedspan.core.values import Client, Message, Reduced, ServerState
from fedspan.errors import FedspanError
from fedspan.federation import serialization
from fedspan.federation.absences import Awaited
from fedspan.federation.aggregation.aggregation import Aggregation, create_aggregation
from fedspan.federation.plausibility import compute_weight_limit, drop_impossible_losses
from fedspan.federation.privacy import compute_expected_charges, compute_round_charges
from fedspan.federation.progress import Failure, Progress, Purpose, RoundResult, TooFew, TooFewReplies, Transfer
from fedspan.federation.protocol import ClientLostState, Envelope, Masking, OrderEncoder, Reply, open_reply
from fedspan.federation.round_context import RoundContext, Tally
from fedspan.federation.second_exchange import build_second_context
from fedspan.federation.transport import Orders, Transport
from fedspan.training.accounting import Charge

OnClient = Callable[[str, float], None]
"""Takes a client's id and its training loss."""

OnFailure = Callable[[str, str], None]
"""Takes a client's id and the reason of its failure."""


class RoundExchange:
    """Orders, replies, events and the result of one round.

    Args:
        progress: The progress before the round: what clients store, and when they last replied.
        best: Round of the stored state of each client at the best progress so far, which clients must not delete.
        on_arrival: Called with a client's id and training loss when its reply arrives, before it is checked.
        on_client: Called with a client's id and training loss when its reply is accepted.
        on_failure: Called with a client's id and a reason when its reply is rejected on arrival or does not arrive.
    """

    def __init__(
        self,
        context: RoundContext,
        aggregation: Aggregation,
        tally: Tally,
        progress: Progress,
        best: Mapping[str, int],
        on_arrival: OnClient | None = None,
        on_client: OnClient | None = None,
        on_failure: OnFailure | None = None,
    ) -> None:
        self.context = context
        self._aggregation, self._tally, self._best = aggregation, tally, best
        self._on_arrival, self._on_client, self._on_failure = on_arrival, on_client, on_failure
        self.last_rounds, self._last_replies = dict(progress.last_rounds), dict(progress.last_replies)
        self.encoder = OrderEncoder(context.run)
        self._created = set[tuple[str, int, int]]()
        self.charges = list[Charge]()
        """The privacy costs so far."""

    def get_client(self, id: str) -> Client:
        """Return a client with the round of the state that it stores."""
        return replace(self.context.clients[id].client, last_round=self.last_rounds.get(id))

    def create_order(
        self,
        id: str,
        state: ServerState,
        attempt: int,
        secure: Masking | None = None,
        charges: Collection[Charge] = (),
    ) -> Envelope:
        """Create the order of a client; one that a transport has made again counts once.

        Args:
            secure: Parameters of the secure sum that the reply enters; None: it is sent in plaintext.
        """
        context, client = self.context, self.get_client(id)
        # Clients of a secure sum agreed on one message, so none may be shorter for what its client stores.
        message = context.method.sync(state, client if secure is None else replace(client, last_round=None))
        order = self.encoder.order(context.task, state.round, id, client, message)
        if (id, state.round, attempt) not in self._created:
            self._created.add((id, state.round, attempt))
            self._tally.transfers.append(create_order_transfer(id, order.body, message, context.purpose))
            self.charges += charges
        lr = context.training.compute_lr(state.round, context.settings.rounds)
        return replace(order, attempt=attempt, lr=lr, best=self._best.get(id), secure=secure).to_envelope()

    def take_reply(self, id: str, reply: Envelope | str, attempt: int) -> bool:
        """Add a reply to the aggregation, or record why there is none.

        Args:
            attempt: Number of the attempt in which it was sent its order, from 0.

        Returns:
            Whether enough replies have arrived.
        """
        try:
            decoded = open_reply(reply)
        except ValueError as error:
            self._record_failure(id, attempt, error)
            return False
        loss = decoded.parts[-1].loss if decoded.parts else math.nan
        if self._on_arrival is not None:  # an error of a listener is none of the client
            self._on_arrival(id, loss)
        try:
            is_enough = self._aggregation.add(self.get_client(id), decoded, attempt)
        except ValueError as error:
            self._record_failure(id, attempt, error)
            return False
        if self._on_client is not None:
            self._on_client(id, loss)
        return is_enough

    def _record_failure(self, id: str, attempt: int, error: ValueError) -> None:
        self._tally.failures.append(Failure(id, attempt, str(error), self.context.purpose))
        if isinstance(error, ClientLostState):
            self._tally.lost.add(id)
        if self._on_failure is not None:
            self._on_failure(id, str(error))

    def forget_lost(self) -> None:
        """Record for the clients that lost what they stored that their next order needs a complete message."""
        for id in self._tally.lost & self.last_rounds.keys():
            self._last_replies[id] = self.last_rounds.pop(id)

    def forget_replied(self, ids: Iterable[str]) -> None:
        """Record the same for clients that lost what they stored after their reply in this round was accepted."""
        for id in ids:
            self.last_rounds.pop(id, None)
            self._last_replies[id] = self.context.state.round

    def build_error(self, succeeded: Collection[str]) -> TooFewReplies:
        """Create the error of a round with too few accepted replies."""
        context, ids = self.context, self.context.ids
        last = {failure.client: failure.reason for failure in self._tally.failures}
        reasons = "; ".join(f"{id}: {last.get(id, 'no reply')}" for id in ids if id not in succeeded)
        if context.task == "statistics":
            subject, remedy = "the exchange of statistics", ""
        else:
            subject = f"{'the second exchange of ' * (context.task == 'second')}round {context.state.round + 1}"
            remedy = ". The state before the round is stored: fix the cause and resume"
        problem = (
            f"{subject} needs good replies of at least {self._aggregation.quorum} of {len(ids)} clients, and has "
            f"{len(succeeded)} ({reasons})"
        )
        return TooFewReplies("good replies", len(succeeded), problem=problem + remedy)

    def build_result(
        self, reduced: Reduced, missed: Collection[str] = frozenset(), attempt: int | None = None
    ) -> RoundResult:
        """Update the server's state, and return the result of a successful round.

        Args:
            missed: Clients whose replies were accepted and that continue from the state before the round all the same.
            attempt: Attempt in which losses that no client can have are recorded; None: that of the client's order.
        """
        context, state, tally, aggregation = self.context, self.context.state, self._tally, self._aggregation
        replies = {id: aggregation.replies[id] for id in context.ids if id in aggregation.replies}
        reported = replies
        if context.settings.validates:
            reported, impossible = drop_impossible_losses(replies)
            tally.failures += [
                Failure(id, replies[id].attempt if attempt is None else attempt, reason, context.purpose)
                for id, reason in impossible
            ]
        counted = [id for id in replies if id not in missed]
        return RoundResult(
            progress=Progress(
                state=context.method.update(state, reduced),
                states=context.transport.accept_replies(counted),
                last_rounds={**self.last_rounds, **{id: replies[id].round for id in counted}},
                last_replies={id: round for id, round in self._last_replies.items() if id not in counted},
            ),
            transfers=tally.sort_transfers(),
            cohort=context.ids,
            lr=context.training.compute_lr(state.round, context.settings.rounds),
            loss=compute_mean_loss(reported.values(), context.settings.max_weight_ratio),
            failures=tally.sort_failures(),
            charges=tuple(self.charges),
            simulated_seconds=context.transport.get_simulated_seconds(),
            clipped=dict(sorted(aggregation.clipped.items())),
            lowered=dict(sorted(aggregation.lowered.items())),
        )


def compute_mean_loss(replies: Iterable[Reply], ratio: float | None) -> float:
    """Return the mean training loss over the examples that clients trained on; NaN if no client reported one.

    Args:
        ratio: Maximum number of examples that counts for a phase of one client, as a multiple of the median (the lower
            middle number if there is an even number of phases); None: no limit. There is none either if that median
            is 0.
    """
    parts = [part for reply in replies for part in reply.parts]
    counts = [part.examples for part in parts]
    if (limit := compute_weight_limit(counts, ratio)) is not None:
        counts = [min(count, limit) for count in counts]
    total = sum(counts)
    return sum(part.loss * count for part, count in zip(parts, counts, strict=True)) / total if total else math.nan


def create_order_transfer(id: str, body: bytes, message: Message, purpose: Purpose = "train") -> Transfer:
    """Create the ledger entry of an order."""
    return Transfer(id, "down", len(body), serialization.compute_payload_size(message), purpose)


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


OnCharge = Callable[[tuple[Charge, ...]], None]
"""Takes the privacy cost of an attempt before its orders are sent; an error that it raises ends the round."""


class Round:
    """One synchronous round: attempts with deadlines, until enough of a cohort's replies are aggregated.

    Args:
        on_charge: Called with the privacy cost of each attempt before its orders are sent; all else as in
            ``RoundExchange``.
    """

    def __init__(
        self,
        context: RoundContext,
        progress: Progress,
        best: Mapping[str, int],
        on_client: OnClient | None = None,
        on_charge: OnCharge | None = None,
        on_failure: OnFailure | None = None,
    ) -> None:
        self.context, self._best = context, best
        self._on_charge, self._on_failure = on_charge, on_failure
        self.tally = Tally()
        """The transfers and failures so far."""
        self.aggregation = create_aggregation(context, self.tally)
        self._exchange = RoundExchange(
            context, self.aggregation, self.tally, progress, best, on_client=on_client, on_failure=on_failure
        )

    def run(self) -> RoundResult:
        """Run the round; if too few replies are accepted, retry failed clients as often as the settings allow."""
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
        for attempt in range(self.context.settings.retries + 1):
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
        """
        context, aggregation = self.context, self.aggregation
        order = context.method.build_second_order(context.state, first)
        second = Round(
            build_second_context(context, order, aggregation.replies, aggregation.clipped),
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
        context.transport.exchange(orders, on_reply, context.settings.deadline, wait_for_offline=attempt > 0)

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
