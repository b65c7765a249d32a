"""The server half of a round: sends orders, retries failed clients and aggregates the accepted replies.

A round is a function ``Progress -> Progress``: nothing is changed in place, so a round that fails or is retried leaves
the server state and every client's memory unchanged. The transport determines where the clients are; the aggregation
determines whether the server sees their replies or only sums of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from fedspan.core.values import Client, Message, Reduced
from fedspan.errors import FedspanError
from fedspan.federation import serialization
from fedspan.federation.aggregation.aggregation import AggregationFactory, RoundContext, Tally
from fedspan.federation.orders import ClientLostState, OrderEncoder, Orders, open_reply
from fedspan.federation.outcomes import Failure, Purpose, TooFew, Transfer
from fedspan.federation.privacy import expected_charges, round_charges
from fedspan.federation.progress import Progress, RoundResult
from fedspan.federation.protocol import Envelope, Masking

__all__ = ["OnClient", "Round", "order_transfer"]

OnClient = Callable[[str, float], None]
"""Takes a client's id and its training loss."""


class Round:
    """One round, until it succeeds or fails.

    Args:
        context: Definition of the round.
        aggregating: Creates the round's aggregation.
        held: Round of the last accepted reply of each client.
        best: The same for the best progress so far: clients must not delete the state that belongs to it.
        on_client: Called with a client's id and training loss when its reply is accepted.
    """

    def __init__(
        self,
        context: RoundContext,
        aggregating: AggregationFactory,
        held: Mapping[str, int],
        best: Mapping[str, int],
        on_client: OnClient | None = None,
    ) -> None:
        self.context, self.on_client, self._best = context, on_client, best
        self.lr = context.training.lr(context.state.round, context.settings.rounds)
        self._held = dict(held)
        self._tally = Tally()
        self._charges = list(round_charges(context.settings, len(context.clients)))
        self.aggregation = aggregating(context, self._tally)

    def run(self) -> RoundResult:
        """Run the round; if too few replies are accepted, retry failed clients as often as the rules allow.

        Raises:
            FedspanError: If too few replies are accepted after all attempts.
        """
        context, aggregation, tally = self.context, self.aggregation, self._tally
        for attempt in range(context.rules.retries + 1):
            clients = {id: self._client(id) for id in aggregation.missing()}
            try:
                self._train(clients, aggregation.open(clients, attempt), attempt)
                reduced = aggregation.close(attempt)
            except TooFew:
                continue
            finally:
                for id in tally.lost:
                    self._held.pop(id, None)
            return self._result(reduced, attempt)
        raise _too_few(aggregation.good(), tally.failures, aggregation.quorum, context.state.round, context.ids)

    def _client(self, id: str) -> Client:
        return replace(self.context.clients[id].client, held=self._held.get(id))

    def _train(self, clients: Mapping[str, Client], masks: Mapping[str, Masking | None], attempt: int) -> None:
        """Order clients to train and aggregate their replies."""
        context, state, tally = self.context, self.context.state, self._tally
        asking, privacy, sent = OrderEncoder(context.run), context.settings.privacy, set[str]()

        def order(id: str) -> Envelope:
            message = context.method.sync(state, clients[id])
            made = asking.order("train", state.round, id, clients[id], message)
            first = id not in sent  # a transport may make an order again that was refused on its way
            sent.add(id)
            if first:
                tally.transfers.append(order_transfer(id, made.body, message))
            if first and privacy is not None and privacy.mechanism != "central":
                self._charges += expected_charges(privacy, context.training, context.method, state, clients[id])
            return replace(made, attempt=attempt, lr=self.lr, best=self._best.get(id), secure=masks[id]).envelope()

        def on_reply(id: str, back: Envelope | str) -> bool:
            try:
                answer = open_reply(back)
                enough = self.aggregation.take(clients[id], answer, attempt)
            except ValueError as error:
                tally.failures.append(Failure(id, attempt, str(error)))
                if isinstance(error, ClientLostState):
                    tally.lost.add(id)
                return False
            if self.on_client is not None:
                self.on_client(id, answer.parts[-1].loss if answer.parts else math.nan)
            return enough

        orders = Orders("train", masks, order)
        context.transport.exchange(orders, on_reply, context.rules.deadline, patient=attempt > 0)

    def _result(self, reduced: Reduced, attempt: int) -> RoundResult:
        """Return the result of a successful round."""
        context, state, tally = self.context, self.context.state, self._tally
        answers = {id: self.aggregation.answers[id] for id in context.ids if id in self.aggregation.answers}
        parts = [part for answer in answers.values() for part in answer.parts]
        examples = sum(part.examples for part in parts)
        failed = {failure.client for failure in tally.failures if failure.attempt == attempt}
        memories, optimizers = context.transport.stored(answers)
        return RoundResult(
            progress=Progress(
                state=context.method.update(state, reduced),
                memories=memories,
                held={**self._held, **dict.fromkeys(answers, state.round)},
                optimizers=optimizers,
            ),
            transfers=tuple(sorted(tally.transfers, key=lambda transfer: (transfer.client, transfer.direction))),
            cohort=context.ids,
            lr=self.lr,
            loss=sum(part.loss * part.examples for part in parts) / examples if examples else math.nan,
            failures=tuple(tally.failures),
            charges=tuple(self._charges),
            simulated_seconds=context.transport.simulated_seconds(),
            late=tuple(id for id in context.ids if id not in self.aggregation.answers and id not in failed),
        )


def order_transfer(id: str, body: bytes, message: Message, purpose: Purpose = "train") -> Transfer:
    """Create the ledger entry of an order.

    Args:
        id: Id of the client.
        body: The encoded message.
        message: The message.
        purpose: Purpose of the order.
    """
    return Transfer(id, "down", len(body), serialization.payload_size(message), purpose)


def _too_few(
    good: Collection[str], failures: Sequence[Failure], quorum: int, round: int, ids: Sequence[str]
) -> FedspanError:
    """Create the error of a round with too few accepted replies.

    Args:
        good: Clients whose replies would be accepted.
        failures: Failures of the other clients.
        quorum: Number of replies that the round needs.
        round: Number of the round, from 0.
        ids: Ids of the selected clients.
    """
    last = {failure.client: failure.reason for failure in failures}
    reasons = "; ".join(f"{id}: {last.get(id, 'no reply')}" for id in ids if id not in good)
    expected = (
        f"at least {quorum} of {len(ids)} clients in round {round + 1} ({reasons}); the state before the round is "
        "kept: fix the cause and resume"
    )
    return FedspanError("good replies", len(good), expected)
