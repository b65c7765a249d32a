"""Aggregation: what an attempt of a round exchanges beside training, and which replies count in its reduction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from fedspan.core.method import Method
from fedspan.core.tensors import Tensors
from fedspan.core.values import Client, Message, Reduced, ServerState
from fedspan.engines import wire
from fedspan.engines.asking import Transport
from fedspan.engines.changes import origin_of
from fedspan.engines.outcomes import Failure, Transfer
from fedspan.engines.parcels import Answer, Masking
from fedspan.engines.privacy import reducer_for
from fedspan.engines.progress import Member
from fedspan.engines.reduction import Reducer
from fedspan.engines.screening import ReplyRules, Screened, require_asked, screened, too_far, untrained
from fedspan.engines.settings import RoundSettings

__all__ = ["Aggregating", "Aggregation", "PlainAggregation", "Setting", "Tally", "TooFew"]


class TooFew(Exception):
    """Too few clients are left in an attempt; the reasons are among the failures."""


@dataclass(frozen=True)
class Setting:
    """What an aggregation knows of its round.

    Args:
        method: The run's method.
        settings: Rounds, reduction and privacy.
        members: All clients of the federation.
        state: The server's state before the round.
        ids: The selected clients, sorted.
        drawn: The same in the order in which they were drawn.
        wanted: Number of replies that the round wants.
        rules: When the round stands.
        transport: The way to the clients.
        run: The run's name.
    """

    method: Method
    settings: RoundSettings
    members: Mapping[str, Member]
    state: ServerState
    ids: tuple[str, ...]
    drawn: tuple[str, ...]
    wanted: int
    rules: ReplyRules
    transport: Transport
    run: str

    @property
    def fresh(self) -> Client:
        """A client of the cohort, as if it held nothing."""
        ids = self.ids or tuple(self.members)[:1]
        return replace(self.members[ids[0]].client, held=None)


@dataclass
class Tally:
    """What happened in a round so far.

    Args:
        transfers: Messages sent and received.
        failures: Clients whose replies do not count, attempt by attempt.
        lost: Clients that lost their store.
    """

    transfers: list[Transfer] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)


class Aggregation(Protocol):
    """One round's aggregation."""

    quorum: int
    """Replies that the round needs."""
    answers: dict[str, Answer]
    """The answers that count, without their bodies, by client."""

    def missing(self) -> tuple[str, ...]:
        """The clients that the next attempt asks."""
        ...

    def open(self, clients: Mapping[str, Client], attempt: int) -> Mapping[str, Masking | None]:
        """Begin an attempt.

        Args:
            clients: The clients that it asks.
            attempt: Its number, from 0.

        Returns:
            The clients that may train, with what each has to know of a secure sum.

        Raises:
            TooFew: If too few clients are left.
        """
        ...

    def take(self, client: Client, answer: Answer, attempt: int) -> bool:
        """Take a reply.

        Returns:
            Whether enough replies are there.

        Raises:
            ValueError: If the reply does not count.
        """
        ...

    def close(self, attempt: int) -> Reduced:
        """End an attempt.

        Returns:
            The round's reduction.

        Raises:
            TooFew: If too few replies count.
        """
        ...

    def good(self) -> Collection[str]:
        """Clients that are not to blame for a round that failed."""
        ...

    def remark(self) -> str | None:
        """What a user should know of the aggregation; None: nothing."""
        ...


class PlainAggregation:
    """Replies that the server sees one by one.

    Where a rule compares replies with each other, all of them are held until the attempt ends; else each is folded into
    the reduction as it comes. A later attempt asks only the clients whose replies do not count yet.

    Args:
        setting: The round.
        tally: Takes what happens.
    """

    def __init__(self, setting: Setting, tally: Tally) -> None:
        self.setting, self.tally = setting, tally
        self.quorum = setting.rules.quorum(setting.wanted)
        self.answers: dict[str, Answer] = {}
        self._held: dict[str, Screened] = {}
        self._expected: dict[tuple[int, float], Message] = {}
        clients = [replace(setting.members[id].client, held=None) for id in setting.ids]
        self._reducer: Reducer = reducer_for(
            setting.settings, clients, len(setting.members), setting.state.round, self._origin
        )

    def missing(self) -> tuple[str, ...]:
        """``Aggregation.missing``."""
        return tuple(id for id in self.setting.ids if id not in self.answers)

    def open(self, clients: Mapping[str, Client], attempt: int) -> Mapping[str, Masking | None]:
        """``Aggregation.open``."""
        return dict.fromkeys(clients)

    def take(self, client: Client, answer: Answer, attempt: int) -> bool:
        """``Aggregation.take``."""
        setting = self.setting
        if not setting.rules.validate:
            require_asked(answer, client.id, setting.state.round, attempt)
            message = wire.decode(answer.body)
            self._reducer.add(client.id, setting.method.contribute(message, client))
            self._count(client.id, answer, message)
            return False
        key = (client.rank, client.scaling)
        if key not in self._expected:
            fresh = replace(client, held=None)
            self._expected[key] = untrained(setting.method, setting.method.sync(setting.state, fresh), fresh)
        budget = setting.method.declared().budgets
        reply = screened(answer, client, setting.state.round, attempt, self._expected[key], budget)
        self._held[client.id] = reply
        self._count(client.id, answer, reply.message)
        return len(self._held) - len(too_far(self._held, setting.rules.norm_factor)) >= setting.wanted

    def _count(self, id: str, answer: Answer, message: Message) -> None:
        self.answers[id] = replace(answer, body=b"")
        self.tally.transfers.append(Transfer(id, "up", len(answer.body), wire.payload_size(message)))

    def close(self, attempt: int) -> Reduced:
        """``Aggregation.close``."""
        setting, held = self.setting, self._held
        if not setting.rules.validate:
            return self._reducer.result()
        for id, why in too_far(held, setting.rules.norm_factor).items():
            self._drop(id)
            self.tally.failures.append(Failure(id, attempt, why))
        if len(held) < self.quorum:
            raise TooFew
        for id in [id for id in setting.drawn if id in held][setting.wanted :]:
            self._drop(id)
        for id in setting.ids:
            reply = held.get(id)
            client = setting.members[id].client
            self._reducer.add(id, None if reply is None else setting.method.contribute(reply.message, client))
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
        setting = self.setting
        fresh = replace(setting.members[next(iter(setting.members))].client, held=None)
        return origin_of(setting.method, setting.method.sync(setting.state, fresh), fresh)


Aggregating = Callable[[Setting, Tally], Aggregation]
"""Makes the aggregation of a round."""
