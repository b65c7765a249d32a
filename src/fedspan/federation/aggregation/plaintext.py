"""Aggregation of replies that the server sees one by one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from fedspan.core.tensors import Tensors
from fedspan.core.values import Client, Message, Reduced
from fedspan.federation import serialization
from fedspan.federation.aggregation.aggregation import RoundContext, Tally
from fedspan.federation.aggregation.reducers import reducer_for
from fedspan.federation.aggregation.reduction import Reducer
from fedspan.federation.changes import origin_of
from fedspan.federation.outcomes import Failure, TooFew, Transfer
from fedspan.federation.protocol import Masking, Reply
from fedspan.federation.validation import (
    ValidatedReply,
    find_outliers,
    require_requested,
    untrained_reply,
    validate_reply,
)

__all__ = ["PlaintextAggregation"]


class PlaintextAggregation:
    """Replies that the server sees one by one.

    Where a rule compares replies with each other, all of them are held until the attempt ends; else each is folded into
    the reduction as it comes. A later attempt asks only the clients whose replies do not count yet.

    Args:
        context: The round.
        tally: Takes what happens.
    """

    def __init__(self, context: RoundContext, tally: Tally) -> None:
        self.context, self.tally = context, tally
        self.quorum = context.rules.quorum(context.wanted)
        self.answers: dict[str, Reply] = {}
        self._held: dict[str, ValidatedReply] = {}
        self._expected: dict[tuple[int, float], Message] = {}
        clients = [replace(context.members[id].client, held=None) for id in context.ids]
        self._reducer: Reducer = reducer_for(
            context.settings, clients, len(context.members), context.state.round, self._origin
        )

    def missing(self) -> tuple[str, ...]:
        """``Aggregation.missing``."""
        return tuple(id for id in self.context.ids if id not in self.answers)

    def open(self, clients: Mapping[str, Client], attempt: int) -> Mapping[str, Masking | None]:
        """``Aggregation.open``."""
        return dict.fromkeys(clients)

    def take(self, client: Client, answer: Reply, attempt: int) -> bool:
        """``Aggregation.take``."""
        context = self.context
        if not context.rules.validate:
            require_requested(answer, client.id, context.state.round, attempt)
            message = serialization.decode(answer.body)
            self._reducer.add(client.id, context.method.contribute(message, client))
            self._count(client.id, answer, message)
            return False
        key = (client.rank, client.scaling)
        if key not in self._expected:
            fresh = replace(client, held=None)
            self._expected[key] = untrained_reply(
                context.method, context.method.sync(context.state, fresh), fresh, context.state.round
            )
        budget = context.method.declared().budgets
        reply = validate_reply(answer, client, context.state.round, attempt, self._expected[key], budget)
        self._held[client.id] = reply
        self._count(client.id, answer, reply.message)
        return len(self._held) - len(find_outliers(self._held, context.rules.norm_factor)) >= context.wanted

    def _count(self, id: str, answer: Reply, message: Message) -> None:
        self.answers[id] = replace(answer, body=b"")
        self.tally.transfers.append(Transfer(id, "up", len(answer.body), serialization.payload_size(message)))

    def close(self, attempt: int) -> Reduced:
        """``Aggregation.close``."""
        context, held = self.context, self._held
        if not context.rules.validate:
            return self._reducer.result()
        for id, why in find_outliers(held, context.rules.norm_factor).items():
            self._drop(id)
            self.tally.failures.append(Failure(id, attempt, why))
        if len(held) < self.quorum:
            raise TooFew
        for id in [id for id in context.drawn if id in held][context.wanted :]:
            self._drop(id)
        for id in context.ids:
            reply = held.get(id)
            client = context.members[id].client
            self._reducer.add(id, None if reply is None else context.method.contribute(reply.message, client))
        return self._reducer.result()

    def _drop(self, id: str) -> None:
        del self._held[id]
        del self.answers[id]

    def good(self) -> Collection[str]:
        """``Aggregation.good``."""
        return self._held

    def remark(self) -> str | None:
        """``Aggregation.remark``."""
        return None

    def _origin(self) -> Tensors:
        context = self.context
        fresh = replace(context.members[next(iter(context.members))].client, held=None)
        return origin_of(context.method, context.method.sync(context.state, fresh), fresh, context.state.round)
