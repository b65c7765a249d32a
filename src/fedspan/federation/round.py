"""One round of a federation: attempts with deadlines, aggregation, and the update of the server's state."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from fedspan.core.values import Client, Message, Reduced
from fedspan.errors import FedspanError
from fedspan.federation import serialization
from fedspan.federation.absences import Awaited
from fedspan.federation.aggregation.aggregation import AggregationFactory
from fedspan.federation.plausibility import drop_impossible_losses
from fedspan.federation.privacy import compute_expected_charges, compute_round_charges
from fedspan.federation.progress import (
    Failure,
    Progress,
    Purpose,
    RoundResult,
    TooFew,
    TooFewReplies,
    Transfer,
)
from fedspan.federation.protocol import (
    ClientLostState,
    Envelope,
    Masking,
    OrderEncoder,
    Reply,
    open_reply,
)
from fedspan.federation.round_context import RoundContext, Tally
from fedspan.federation.second_exchange import build_second_context
from fedspan.federation.transport import Orders
from fedspan.federation.weights import compute_weight_limit
from fedspan.training.accounting import Charge

__all__ = [
    "OnCharge",
    "OnClient",
    "OnFailure",
    "Round",
    "build_too_few_error",
    "compute_client_charges",
    "compute_mean_loss",
    "create_order_transfer",
]

OnClient = Callable[[str, float], None]
"""Takes a client's id and its training loss."""

OnFailure = Callable[[str, str], None]
"""Takes a client's id and the reason of its failure."""


OnCharge = Callable[[tuple[Charge, ...]], None]
"""Takes the privacy cost of an attempt before its orders are sent; an error that it raises ends the round."""


class Round:
    """One round, until it succeeds or fails.

    Args:
        context: Definition of the round.
        new_aggregation: Creates the round's aggregation.
        progress: The progress before the round: what clients store, and when they last replied.
        best: The same for the best progress so far: clients must not delete the state that belongs to it.
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
        self.context, self.on_client, self.on_charge, self._best = context, on_client, on_charge, best
        self._on_failure, self._new_aggregation = on_failure, new_aggregation
        self.lr = context.training.compute_lr(context.state.round, context.settings.rounds)
        self._last_rounds, self._last_replies = dict(progress.last_rounds), dict(progress.last_replies)
        self._tally, self._lost, self._missed = Tally(), frozenset[str](), frozenset[str]()
        self._charges, self._encoder = list[Charge](), OrderEncoder(context.run)
        self.aggregation = new_aggregation(context, self._tally)

    def run(self) -> RoundResult:
        """Run the round; if too few replies are accepted, retry failed clients as often as the rules allow.

        Raises:
            FedspanError: If too few replies are accepted after all attempts.
        """
        reduced, attempt = self.reduce()
        if self.context.method.declare_claims().second_exchange:
            reduced = self._run_second_exchange(reduced)
        return self._build_result(reduced, attempt)

    @property
    def tally(self) -> Tally:
        """The transfers and failures so far."""
        return self._tally

    def reduce(self) -> tuple[Reduced, int]:
        """Exchange orders and replies, and return the reduction and the number of the successful attempt, from 0.

        Raises:
            TooFewReplies: If too few replies are accepted after all attempts.
        """
        context, aggregation, tally = self.context, self.aggregation, self._tally
        for attempt in range(context.rules.retries + 1):
            clients = {id: self._get_client(id) for id in aggregation.get_missing()}
            try:
                self._train(clients, aggregation.open(clients, attempt, self._encoder), attempt)
                reduced = aggregation.close(attempt)
            except TooFew:
                continue
            finally:
                for id in tally.lost & self._last_rounds.keys():
                    self._last_replies[id] = self._last_rounds.pop(id)
            return reduced, attempt
        raise build_too_few_error(context, aggregation.get_succeeded(), tally.failures, aggregation.quorum)

    def _run_second_exchange(self, first: Reduced) -> Reduced:
        """Run the second exchange with the clients whose replies were accepted, and return both reductions as one.

        Raises:
            TooFewReplies: If too few replies are accepted after all attempts.
            FedspanError: If the method names tensors of both replies alike.
        """
        context, aggregation = self.context, self.aggregation
        order = context.method.build_second_order(context.state, first)
        second = Round(
            build_second_context(context, order, aggregation.replies, aggregation.clipped),
            self._new_aggregation,
            Progress(context.state, last_rounds=self._last_rounds),
            self._best,
            on_failure=self._on_failure,
        )
        try:
            reduced, _ = second.reduce()
        finally:
            self._tally.extend(second.tally)
        self._lost = frozenset(second.tally.lost)
        self._missed = frozenset(aggregation.replies) - frozenset(second.aggregation.replies)
        for id in self._lost:
            self._last_rounds.pop(id, None)
        if both := sorted(first.mean.keys() & reduced.mean.keys()):
            problem = f"both replies of {context.method.declare_claims().paper} have a tensor of this name"
            raise FedspanError("method", both[0], "other names in build_second_reply than in finish", problem=problem)
        return replace(first, mean={**first.mean, **reduced.mean})

    def _get_client(self, id: str) -> Client:
        return replace(self.context.clients[id].client, last_round=self._last_rounds.get(id))

    def _train(self, clients: Mapping[str, Client], masks: Mapping[str, Masking | None], attempt: int) -> None:
        """Order clients to train and aggregate their replies."""
        context, state, tally = self.context, self.context.state, self._tally
        sent, costs = set[str](), self._announce(masks, clients, attempt)

        def order(id: str) -> Envelope:
            # Clients of a secure sum agreed on one message, so none may be shorter for what its client stores.
            client = clients[id] if masks[id] is None else replace(clients[id], last_round=None)
            message = context.method.sync(state, client)
            encoded = self._encoder.order(context.task, state.round, id, clients[id], message)
            first = id not in sent  # a transport may make an order again that was refused on its way
            sent.add(id)
            if first:
                tally.transfers.append(create_order_transfer(id, encoded.body, message, context.purpose))
                self._charges += costs.get(id, ())
            return replace(
                encoded, attempt=attempt, lr=self.lr, best=self._best.get(id), secure=masks[id]
            ).to_envelope()

        # All participants of a secure sum have already replied in this attempt, and a retry needs every client.
        absent = [] if attempt else [id for id in context.absent if id in masks and masks[id] is None]
        awaited = Awaited(masks, absent)

        def on_reply(id: str, reply: Envelope | str) -> bool:
            is_enough = accept(id, reply)
            return awaited.is_over(id, self.aggregation.get_counted, self.aggregation.quorum) or is_enough

        def accept(id: str, reply: Envelope | str) -> bool:
            try:
                decoded = open_reply(reply)
                is_enough = self.aggregation.add(clients[id], decoded, attempt)
            except ValueError as error:
                tally.failures.append(Failure(id, attempt, str(error), context.purpose))
                if isinstance(error, ClientLostState):
                    tally.lost.add(id)
                if self._on_failure is not None:
                    self._on_failure(id, tally.failures[-1].reason)
                return False
            if self.on_client is not None:
                self.on_client(id, decoded.parts[-1].loss if decoded.parts else math.nan)
            return is_enough

        orders = Orders(context.task, masks, order, lambda id: self.aggregation.compute_reply_bytes(clients[id]))
        context.transport.exchange(orders, on_reply, context.rules.deadline, wait_for_offline=attempt > 0)

    def _announce(
        self, ids: Iterable[str], clients: Mapping[str, Client], attempt: int
    ) -> Mapping[str, tuple[Charge, ...]]:
        """Return what an attempt's orders cost each client, after announcing it with what the round costs all."""
        context, privacy = self.context, self.context.settings.privacy
        if privacy is None:
            return {}
        shared = compute_round_charges(context.settings, len(context.clients)) if attempt == 0 else ()
        self._charges += shared
        costs = (
            {} if privacy.mechanism == "central" else compute_client_charges(context, {id: clients[id] for id in ids})
        )
        if self.on_charge is not None:
            self.on_charge((*shared, *(charge for client_costs in costs.values() for charge in client_costs)))
        return costs

    def _build_result(self, reduced: Reduced, attempt: int) -> RoundResult:
        """Return the result of a successful round."""
        context, state, tally = self.context, self.context.state, self._tally
        replies = {id: self.aggregation.replies[id] for id in context.ids if id in self.aggregation.replies}
        failed = {failure.client for failure in tally.failures if failure.attempt == attempt}
        reported = replies
        if context.rules.validate:
            reported, impossible = drop_impossible_losses(replies)
            tally.failures += [Failure(id, attempt, reason, context.purpose) for id, reason in impossible]
        # The others' next orders continue from the state before this round.
        counted = [id for id in replies if id not in self._missed]
        memories, optimizers = context.transport.accept_replies(counted)
        return RoundResult(
            progress=Progress(
                state=context.method.update(state, reduced),
                memories=memories,
                last_rounds={**self._last_rounds, **dict.fromkeys(counted, state.round)},
                optimizers=optimizers,
                last_replies={
                    **{id: round for id, round in self._last_replies.items() if id not in counted},
                    **dict.fromkeys(self._lost, state.round),
                },
            ),
            transfers=tally.sort_transfers(),
            cohort=context.ids,
            lr=self.lr,
            loss=compute_mean_loss(reported.values(), context.settings.max_weight_ratio),
            failures=tally.sort_failures(),
            charges=tuple(self._charges),
            simulated_seconds=context.transport.get_simulated_seconds(),
            late=tuple(id for id in context.ids if id not in self.aggregation.replies and id not in failed),
            clipped=dict(sorted(self.aggregation.clipped.items())),
            lowered=dict(sorted(self.aggregation.lowered.items())),
        )


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


def compute_mean_loss(replies: Iterable[Reply], ratio: float | None) -> float:
    """Return the mean training loss over the examples that clients trained on; NaN if no client reported one.

    Args:
        replies: The accepted replies.
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
    """Create the ledger entry of an order.

    Args:
        id: Id of the client.
        body: The encoded message.
        message: The message.
        purpose: Purpose of the order.
    """
    return Transfer(id, "down", len(body), serialization.compute_payload_size(message), purpose)


def build_too_few_error(
    context: RoundContext, succeeded: Collection[str], failures: Sequence[Failure], quorum: int
) -> TooFewReplies:
    """Create the error of a round with too few accepted replies.

    Args:
        context: Definition of the round.
        succeeded: Clients whose replies would be accepted.
        failures: Failures of the other clients.
        quorum: Number of replies that the round needs.
    """
    last, ids = {failure.client: failure.reason for failure in failures}, context.ids
    reasons = "; ".join(f"{id}: {last.get(id, 'no reply')}" for id in ids if id not in succeeded)
    if context.task == "statistics":
        subject, remedy = "the exchange of statistics", ""
    else:
        subject = f"{'the second exchange of ' * (context.task == 'second')}round {context.state.round + 1}"
        remedy = ". The state before the round is stored: fix the cause and resume"
    problem = (
        f"{subject} needs good replies of at least {quorum} of {len(ids)} clients, and has {len(succeeded)} ({reasons})"
    )
    return TooFewReplies("good replies", len(succeeded), problem=problem + remedy)
