"""The server's half of rounds whose clients are elsewhere: asks, screens what comes back, and goes on with what counts.

What is asked travels by a ``Transport``; the clients' half is ``participant.Participant``. Rounds give the same states
as ``Federation.play`` on one machine where the same clients reply.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fedspan.core.method import Method
from fedspan.core.values import Client, Message, Reduced, ServerState
from fedspan.engines import wire
from fedspan.engines.asking import Asking, Forgot, Transport, opened
from fedspan.engines.engine import Engine
from fedspan.engines.federation import Failure, Federation, Member, Progress, RoundResult, Transfer
from fedspan.engines.parcels import Answer, Order, Parcel
from fedspan.engines.robust import reducer_for
from fedspan.engines.screening import ReplyRules, Screened, screened, too_far, untrained
from fedspan.engines.settings import RoundSettings
from fedspan.errors import FedspanError
from fedspan.tasks.task import Examples

__all__ = ["RemoteFederation", "too_few"]


@dataclass
class _Asked:
    """What has come of a round so far."""

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
            raise too_few(everything.good, everything.failures, quorum, state.round, ids)
        asked = {id: self.client(id, progress) for id in ids}
        reducer = reducer_for(self.settings, list(asked.values()))
        for id in ids:
            reply = everything.good.get(id)
            reducer.add(id, None if reply is None else self.method.contribute(reply.message, asked[id]))
        answers = {id: everything.parts[id] for id in ids if id in everything.good}
        return self._concluded(state, held, reducer.result(), answers, transfers, everything.failures)

    def _concluded(
        self,
        state: ServerState,
        held: Mapping[str, int],
        reduced: Reduced,
        answers: Mapping[str, Answer],
        transfers: list[Transfer],
        failures: Sequence[Failure],
    ) -> RoundResult:
        """The end of a round.

        Args:
            state: before it.
            held: by all clients, as far as their replies don't count.
            reduced: the replies that do.
            answers: what those clients said, in the ids' order.
            transfers: of the whole round.
            failures: of those whose replies don't count.
        """
        parts = [part for answer in answers.values() for part in answer.parts]
        examples = sum(part.examples for part in parts)
        transfers.sort(key=lambda transfer: (transfer.client, transfer.direction))
        after = Progress(state=self.method.update(state, reduced), held={**held, **dict.fromkeys(answers, state.round)})
        lr = self.engine.settings.lr(state.round, self.settings.rounds)
        loss = sum(part.loss * part.examples for part in parts) / max(1.0, examples)
        return RoundResult(after, tuple(transfers), self.cohort(state.round), lr, loss, tuple(failures))

    def conclude(self, progress: Progress) -> tuple[Failure, ...]:
        """``Federation.conclude``: of a method with personal models, every client exports its own, where it is."""
        if not self.exporting or not self.method.declared().personal:
            return ()
        state, asking = progress.state, Asking(self.run)
        parcels: dict[str, Parcel] = {}
        for id in self.members:
            client = self.client(id, progress)
            parcels[id] = asking.order("export", state.round, id, client, self.method.sync(state, client)).parcel()
        failures: list[Failure] = []
        for id, back in self.transport.exchange(parcels, self.rules.deadline):
            try:
                opened(back)
            except ValueError as error:
                failures.append(Failure(id, 0, str(error)))
        return tuple(failures)

    def _orders(
        self,
        state: ServerState,
        clients: Mapping[str, Client],
        lr: float,
        attempt: int,
        transfers: list[Transfer],
    ) -> Iterator[tuple[str, Order]]:
        """The orders to train, one by one, with what the ledger counts of each."""
        asking = Asking(self.run)
        for id, client in clients.items():
            message = self.method.sync(state, client)
            order = asking.order("train", state.round, id, client, message)
            transfers.append(Transfer(id, "down", len(order.body), wire.payload_size(message)))
            yield id, replace(order, attempt=attempt, lr=lr, best=self._best.get(id))

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
        expected: dict[tuple[int, float], Message] = {}
        parcels = {id: order.parcel() for id, order in self._orders(state, clients, lr, attempt, transfers)}
        budget = self.method.declared().budgets
        for id, back in self.transport.exchange(parcels, self.rules.deadline, patient=attempt > 0):
            client = clients[id]
            key = (client.rank, client.scaling)
            if key not in expected:
                fresh = replace(client, held=None)
                expected[key] = untrained(self.method, self.method.sync(state, fresh), fresh)
            try:
                answer = opened(back)
                reply = screened(answer, client, state.round, attempt, expected[key], budget)
            except ValueError as error:
                found.failures.append(Failure(id, attempt, str(error)))
                if isinstance(error, Forgot):
                    found.lost.add(id)
                continue
            found.good[id], found.parts[id] = reply, answer
            transfers.append(Transfer(id, "up", len(answer.body), wire.payload_size(reply.message)))
            if on_client is not None:
                on_client(id, answer.parts[-1].loss if answer.parts else float("nan"))


def too_few(
    good: Collection[str], failures: Sequence[Failure], quorum: int, round: int, ids: Sequence[str]
) -> FedspanError:
    """The error of a round that does not stand.

    Args:
        good: clients whose replies would count.
        failures: of the others, and why.
        quorum: clients that it takes.
        round: number, from 0.
        ids: of the cohort.
    """
    last = {failure.client: failure.reason for failure in failures}
    told = "; ".join(f"{id}: {last.get(id, 'no reply')}" for id in ids if id not in good)
    expected = (
        f"at least {quorum} of {len(ids)} clients in round {round + 1} ({told}); the state before the round is kept: "
        "put it right and resume"
    )
    return FedspanError("good replies", len(good), expected)
