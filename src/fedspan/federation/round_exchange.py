"""A round's exchange: orders, replies, events and the result.

When orders start, and when the update closes, is the schedule's: ``Round`` or ``BufferedRound``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from fedspan.core.values import Client, Message, Reduced, ServerState
from fedspan.federation import serialization
from fedspan.federation.aggregation.aggregation import Aggregation
from fedspan.federation.plausibility import compute_weight_limit, drop_impossible_losses
from fedspan.federation.progress import Failure, Progress, Purpose, RoundResult, TooFewReplies, Transfer
from fedspan.federation.protocol import ClientLostState, Envelope, Masking, OrderEncoder, Reply, open_reply
from fedspan.federation.round_context import RoundContext, Tally
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
            state: The state of the server that it is sent.
            attempt: Number of the attempt, from 0.
            secure: Parameters of the secure sum that the reply enters; None: it is sent in plaintext.
            charges: Privacy costs of the order.
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
            reply: Its reply, or the reason for its absence.
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
        """Record why a reply does not count."""
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
            reduced: The round's reduction.
            missed: Clients whose replies were accepted and that continue from the state before the round all the same.
            attempt: Attempt in which losses that no client can have are recorded; None: that of the client's order.
        """
        context, state, tally, aggregation = self.context, self.context.state, self._tally, self._aggregation
        replies = {id: aggregation.replies[id] for id in context.ids if id in aggregation.replies}
        reported = replies
        if context.rules.validate:
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
    """Create the ledger entry of an order."""
    return Transfer(id, "down", len(body), serialization.compute_payload_size(message), purpose)
