"""The server's half of rounds whose clients are elsewhere: asks, screens what comes back, and goes on with what counts.

What is asked travels by a ``Transport``; the clients' half is ``participant.Participant``. Rounds give the same states
as ``Federation.play`` on one machine where the same clients reply.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from fedspan.core.method import Memory, Method
from fedspan.core.values import Client, Job, Message, ServerState
from fedspan.engines import wire
from fedspan.engines.engine import Engine
from fedspan.engines.evaluation import ClientScores, Evaluator
from fedspan.engines.federation import Failure, Federation, Member, Progress, RoundResult, Transfer, the_very_same
from fedspan.engines.parcels import Answer, Order, Parcel, Scores, open_answer
from fedspan.engines.robust import reducer_for
from fedspan.engines.screening import ReplyRules, Screened, screened, too_far, untrained
from fedspan.engines.settings import RoundSettings
from fedspan.errors import FedspanError
from fedspan.tasks.task import Examples

__all__ = ["RemoteEvaluator", "RemoteFederation", "Transport"]


class Transport(Protocol):
    """Brings parcels to clients and their answers back."""

    def exchange(
        self, parcels: Mapping[str, Parcel], seconds: float, *, patient: bool = False
    ) -> Iterator[tuple[str, Parcel | str]]:
        """Send every client its parcel, and hand out what comes back, in any order, until all did or time is up.

        Args:
            parcels: by client id.
            seconds: to wait.
            patient: wait for clients that can't be reached, too; else they are given up at once.

        Returns:
            Client ids with their answers, or with the reason in words why there is none.
        """
        ...


@dataclass
class _Asked:
    """One attempt of a round."""

    good: dict[str, Screened]
    parts: dict[str, Answer]
    failures: list[Failure]
    lost: set[str]


class RemoteFederation(Federation):
    """A federation whose clients are reached by a transport.

    Args:
        method: the method, with its wrappers.
        engine: has the model, for ``init`` and what is exported; trains nothing here.
        members: the clients; of their examples only the numbers are known.
        examples: of the server, if it has any.
        settings: rounds, cohort, seed.
        transport: to the clients.
        rules: when a round stands.
        run: its name, for nodes that may know several.
        exporting: whether clients export their own models, because the server does not see them.
    """

    def __init__(
        self,
        method: Method,
        engine: Engine,
        members: Sequence[Member] | Mapping[str, Member],
        examples: Examples,
        settings: RoundSettings,
        transport: Transport,
        rules: ReplyRules,
        run: str = "",
        exporting: bool = True,
    ) -> None:
        super().__init__(method, engine, members, examples, settings)
        self.transport, self.rules, self.run, self.exporting = transport, rules, run, exporting
        self._best: Mapping[str, int] = {}

    def remember(self, best: Progress) -> None:
        """``Federation.remember``: clients are told not to throw away what belongs to it."""
        self._best = best.held

    def play(self, progress: Progress, on_client: Callable[[str, float], None] | None = None) -> RoundResult:
        """One round; a client that failed is asked again, as often as the rules allow, if too few replies are good.

        Args:
            progress: before the round; left as it is.
            on_client: called with a client's id and training loss when its reply has passed on its own.

        Raises:
            FedspanError: if there are too few good replies in the end; the progress is what it was.
        """
        state = progress.state
        lr = self.engine.settings.lr(state.round, self.settings.rounds)
        ids, held = self.cohort(state.round), dict(progress.held)
        everything = _Asked({}, {}, [], set())
        transfers: list[Transfer] = []
        quorum = self.rules.quorum(len(ids))
        for attempt in range(self.rules.retries + 1):
            clients = {id: self.client(id, replace(progress, held=held)) for id in ids if id not in everything.good}
            self._ask(state, clients, lr, attempt, everything, transfers, on_client)
            for id in everything.lost:
                held.pop(id, None)
            for id, why in too_far(everything.good, self.rules.norm_factor).items():
                del everything.good[id]
                everything.failures.append(Failure(id, attempt, why))
            if len(everything.good) >= quorum:
                break
        else:
            raise _too_few(everything, quorum, state.round, ids)
        asked = {id: self.client(id, progress) for id in ids}
        reducer = reducer_for(self.settings, list(asked.values()))
        for id in ids:
            reply = everything.good.get(id)
            reducer.add(id, None if reply is None else self.method.contribute(reply.message, asked[id]))
        parts = [part for id in ids if id in everything.good for part in everything.parts[id].parts]
        examples = sum(part.examples for part in parts)
        transfers.sort(key=lambda transfer: (transfer.client, transfer.direction))
        after = Progress(
            state=self.method.update(state, reducer.result()),
            held={**held, **dict.fromkeys(everything.good, state.round)},
        )
        loss = sum(part.loss * part.examples for part in parts) / max(1.0, examples)
        return RoundResult(after, tuple(transfers), ids, lr, loss, tuple(everything.failures))

    def conclude(self, progress: Progress) -> tuple[Failure, ...]:
        """``Federation.conclude``: of a method with personal models, every client exports its own, where it is."""
        if not self.exporting or not self.method.declared().personal:
            return ()
        state, bodies = progress.state, _Bodies()
        parcels: dict[str, Parcel] = {}
        for id in self.members:
            client = self.client(id, progress)
            body, serial = bodies.encoded(self.method.sync(state, client)), time.time_ns() // 1000
            parcels[id] = Order("export", state.round, 0, 0.0, id, client, body, None, self.run, serial).parcel()
        failures: list[Failure] = []
        for id, back in self.transport.exchange(parcels, self.rules.deadline):
            try:
                answer = _opened(back)
            except ValueError as error:
                failures.append(Failure(id, 0, str(error)))
                continue
            if answer.failed is not None:
                failures.append(Failure(id, 0, answer.failed))
        return tuple(failures)

    def _ask(
        self,
        state: ServerState,
        clients: Mapping[str, Client],
        lr: float,
        attempt: int,
        found: _Asked,
        transfers: list[Transfer],
        on_client: Callable[[str, float], None] | None,
    ) -> None:
        bodies = _Bodies()
        expected: dict[tuple[int, float], Message] = {}
        parcels: dict[str, Parcel] = {}
        for id, client in clients.items():
            message = self.method.sync(state, client)
            body = bodies.encoded(message)
            best, serial = self._best.get(id), time.time_ns() // 1000
            order = Order("train", state.round, attempt, lr, id, client, body, best, self.run, serial)
            parcels[id] = order.parcel()
            transfers.append(Transfer(id, "down", len(body), wire.payload_size(message)))
        budget = self.method.declared().budgets
        for id, back in self.transport.exchange(parcels, self.rules.deadline, patient=attempt > 0):
            client = clients[id]
            key = (client.rank, client.scaling)
            if key not in expected:
                fresh = replace(client, held=None)
                expected[key] = untrained(self.method, self.method.sync(state, fresh), fresh)
            try:
                answer = _opened(back)
                reply = screened(answer, client, state.round, attempt, expected[key], budget)
            except ValueError as error:
                found.failures.append(Failure(id, attempt, str(error)))
                if isinstance(error, _Forgot):
                    found.lost.add(id)
                continue
            found.good[id], found.parts[id] = reply, answer
            transfers.append(Transfer(id, "up", len(answer.body), wire.payload_size(reply.message)))
            if on_client is not None:
                on_client(id, answer.parts[-1].loss if answer.parts else float("nan"))


class RemoteEvaluator(Evaluator):
    """Evaluates where the clients are: they are sent the models and answer with metrics.

    Pooled metrics are the clients' means, weighted by their numbers of examples.

    Args:
        federation: what is evaluated.
        batch_size: of the server's forward passes.
        clients: how many clients are measured; None: all.
        memories: what a client kept of a round, where the server can see it (a simulation); None: it stays with them.
    """

    federation: RemoteFederation

    def __init__(
        self,
        federation: RemoteFederation,
        batch_size: int,
        clients: int | None = None,
        memories: Callable[[str, int], Memory] | None = None,
    ) -> None:
        super().__init__(federation, batch_size, clients)
        self._memories = memories

    def job(self, progress: Progress, client_id: str | None) -> Job:
        """``Evaluator.job``, where what the client keeps can be seen from here."""
        held = None if client_id is None else progress.held.get(client_id)
        if client_id is None or held is None:
            return super().job(progress, client_id)
        assert self._memories is not None, "models() names no client otherwise"
        memory = self._memories(client_id, held)
        return super().job(replace(progress, memories={client_id: memory}), client_id)

    def models(self, progress: Progress, clients: Iterable[str] | None = None) -> Iterator[tuple[tuple[str, ...], Job]]:
        """``Evaluator.models``; clients' own models only where what clients keep can be seen from here."""
        if self._memories is None and self.federation.method.declared().personal:
            return iter(())
        return super().models(progress, clients)

    def clients(self, progress: Progress) -> tuple[ClientScores | None, ClientScores | None]:
        """``Evaluator.clients``; those that do not answer are left out."""
        federation = self.federation
        method, state, bodies = federation.method, progress.state, _Bodies()
        personal = method.declared().personal
        parcels: dict[str, Parcel] = {}
        for id in self.ids:
            client = federation.client(id, progress) if personal else None
            body = bodies.encoded(method.sync(state, client))
            serial = time.time_ns() // 1000
            order = Order("evaluate", state.round, 0, 0.0, id, client, body, None, federation.run, serial)
            parcels[id] = order.parcel()
        found: dict[str, dict[str, Scores]] = {"validation": {}, "test": {}}
        for id, back in federation.transport.exchange(parcels, federation.rules.deadline):
            try:
                answer = _opened(back)
            except ValueError:
                continue
            if (answer.task, answer.id, answer.round) == ("evaluate", id, state.round) and answer.failed is None:
                for part, scores in (answer.scores or {}).items():
                    found[part][id] = scores
        return _pooled(found["validation"]), _pooled(found["test"])


class _Forgot(ValueError):
    """A client that lost what it kept."""


def _opened(back: Parcel | str) -> Answer:
    """What came back.

    Raises:
        ValueError: if it is no answer.
    """
    if isinstance(back, str):
        raise ValueError(back)
    answer = open_answer(back)
    if answer.lost:
        raise _Forgot(answer.failed or "it lost what it kept")
    return answer


def _pooled(by_client: Mapping[str, Scores]) -> ClientScores | None:
    rows = {id: dict(by_client[id]) for id in sorted(by_client) if by_client[id].get("examples", 0) > 0}
    if not rows:
        return None
    names = [name for name in next(iter(rows.values())) if all(name in row for row in rows.values())]
    weights = np.array([row["examples"] for row in rows.values()])
    pooled = {name: float(np.average([row[name] for row in rows.values()], weights=weights)) for name in names}
    return ClientScores({**pooled, "examples": float(weights.sum())}, rows)


def _too_few(found: _Asked, quorum: int, round: int, ids: Sequence[str]) -> FedspanError:
    last = {failure.client: failure.reason for failure in found.failures}
    told = "; ".join(f"{id}: {last.get(id, 'no reply')}" for id in ids if id not in found.good)
    expected = (
        f"at least {quorum} of {len(ids)} clients in round {round + 1} ({told}); the state before the round is kept: "
        "put it right and resume"
    )
    return FedspanError("good replies", len(found.good), expected)


class _Bodies:
    """Encodes messages, those in a row with the very same tensors once."""

    def __init__(self) -> None:
        self._last: tuple[Message, bytes] | None = None

    def encoded(self, message: Message) -> bytes:
        """A message as bytes."""
        if self._last is None or not the_very_same(message, self._last[0]):
            self._last = (message, wire.encode(message))
        return self._last[1]
