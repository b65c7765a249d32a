"""The server's half of rounds whose clients are elsewhere: asks, screens what comes back, and goes on with what counts.

What is asked travels by a ``Transport``; the clients' half is ``participant.Participant``. Rounds give the same states
as ``Federation.play`` on one machine where the same clients reply.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fedspan.core.method import Method
from fedspan.core.values import Client, Message, Reduced, ServerState
from fedspan.engines import wire
from fedspan.engines.accounting import Charge
from fedspan.engines.asking import Asking, Forgot, Transport, opened
from fedspan.engines.engine import Engine
from fedspan.engines.federation import Beside, Failure, Federation, Member, Progress, RoundResult, Transfer
from fedspan.engines.parcels import Answer, Order, Parcel
from fedspan.engines.privacy import order_charges, round_charges
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
    charges: list[Charge]


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
        self._transfers: list[Transfer] = []
        self._failures: list[Failure] = []

    def remember(self, best: Progress) -> None:
        """``Federation.remember``: clients are told not to throw away what belongs to it."""
        self._best = best.held

    def cohort(self, round: int) -> tuple[str, ...]:
        """``Federation.cohort``, with those that are asked beside it (``ReplyRules.over_select``)."""
        return tuple(sorted(self.drawn(round, self.rules.over_select)))

    def play(self, progress: Progress, on_client: Callable[[str, float], None] | None = None) -> RoundResult:
        """One round; a client that failed is asked again, as often as the rules allow, if too few replies are good.

        Where more clients are asked than a round wants, it goes on as soon as as many good replies are there as it
        wants. If one of them turns out to be too far from the others, it waits for one more; should there be more than
        wanted in the end, those count that were drawn first. So the state follows from who replied, in whatever order.

        Args:
            progress: before the round; left as it is.
            on_client: called with a client's id and training loss when its reply has passed on its own.

        Raises:
            FedspanError: if there are too few good replies in the end; the progress is what it was.
        """
        state = progress.state
        lr = self.engine.settings.lr(state.round, self.settings.rounds)
        ids, held = self.cohort(state.round), dict(progress.held)
        wanted = len(self.drawn(state.round))
        everything = _Asked({}, {}, [], set(), [])
        transfers: list[Transfer] = []
        quorum, attempt = self.rules.quorum(wanted), 0
        for attempt in range(self.rules.retries + 1):
            clients = {id: self.client(id, replace(progress, held=held)) for id in ids if id not in everything.good}
            self._ask(state, clients, lr, attempt, everything, transfers, on_client, wanted)
            for id in everything.lost:
                held.pop(id, None)
            for id, why in too_far(everything.good, self.rules.norm_factor).items():
                del everything.good[id]
                everything.failures.append(Failure(id, attempt, why))
            if len(everything.good) >= quorum:
                break
        else:
            raise too_few(everything.good, everything.failures, quorum, state.round, ids)
        failed = {failure.client for failure in everything.failures if failure.attempt == attempt}
        for id in [id for id in self.drawn(state.round, self.rules.over_select) if id in everything.good][wanted:]:
            del everything.good[id]
        late = tuple(id for id in ids if id not in everything.good and id not in failed)
        asked = {id: self.client(id, progress) for id in ids}
        reducer = self._reducer(state, list(asked.values()))
        for id in ids:
            reply = everything.good.get(id)
            reducer.add(id, None if reply is None else self.method.contribute(reply.message, asked[id]))
        answers = {id: everything.parts[id] for id in ids if id in everything.good}
        return self._concluded(
            state, held, reducer.result(), answers, transfers, everything.failures, everything.charges, late
        )

    def _concluded(
        self,
        state: ServerState,
        held: Mapping[str, int],
        reduced: Reduced,
        answers: Mapping[str, Answer],
        transfers: list[Transfer],
        failures: Sequence[Failure],
        charges: Sequence[Charge],
        late: Sequence[str] = (),
    ) -> RoundResult:
        """The end of a round.

        Args:
            state: before it.
            held: by all clients, as far as their replies don't count.
            reduced: the replies that do.
            answers: what those clients said, in the ids' order.
            transfers: of the whole round.
            failures: of those whose replies don't count.
            charges: of the orders.
            late: those without whom there were enough.
        """
        parts = [part for answer in answers.values() for part in answer.parts]
        examples = sum(part.examples for part in parts)
        transfers.sort(key=lambda transfer: (transfer.client, transfer.direction))
        after = Progress(state=self.method.update(state, reduced), held={**held, **dict.fromkeys(answers, state.round)})
        lr = self.engine.settings.lr(state.round, self.settings.rounds)
        loss = sum(part.loss * part.examples for part in parts) / examples if examples else math.nan
        charges = (*round_charges(self.settings, len(self.members)), *charges)
        ids, failed = self.cohort(state.round), tuple(failures)
        return RoundResult(after, tuple(transfers), ids, lr, loss, failed, tuple(charges), tuple(late))

    def conclude(self, progress: Progress) -> tuple[Failure, ...]:
        """``Federation.conclude``: of a method with personal models, every client exports its own, where it is."""
        if not self.exporting or not self.method.declared().personal:
            return ()
        state, asking = progress.state, Asking(self.run)
        parcels: dict[str, Parcel] = {}
        for id in self.members:
            client = self.client(id, progress)
            message = self.method.sync(state, client)
            order = asking.order("export", state.round, id, client, message)
            parcels[id] = order.parcel()
            self.note(Transfer(id, "down", len(order.body), wire.payload_size(message), "export"))
        failures: list[Failure] = []
        for id, back in self.transport.exchange(parcels, self.rules.deadline):
            try:
                opened(back)
            except ValueError as error:
                failures.append(Failure(id, 0, str(error), "export"))
        return tuple(failures)

    def note(self, happened: Transfer | Failure) -> None:
        """Add to what happened beside the rounds."""
        if isinstance(happened, Transfer):
            self._transfers.append(happened)
        else:
            self._failures.append(happened)

    def beside(self) -> Beside:
        """``Federation.beside``."""
        taken = Beside(tuple(self._transfers), tuple(self._failures))
        self._transfers.clear()
        self._failures.clear()
        return taken

    def _orders(
        self,
        state: ServerState,
        clients: Mapping[str, Client],
        lr: float,
        attempt: int,
        transfers: list[Transfer],
        charges: list[Charge],
    ) -> Iterator[tuple[str, Order]]:
        """The orders to train, one by one, with what the ledger counts of each and what it costs."""
        asking = Asking(self.run)
        for id, client in clients.items():
            message = self.method.sync(state, client)
            order = asking.order("train", state.round, id, client, message)
            transfers.append(Transfer(id, "down", len(order.body), wire.payload_size(message)))
            if self.settings.privacy is not None:
                fresh = replace(client, held=None)
                whole = self.method.sync(state, fresh)
                charges += order_charges(self.settings.privacy, self.engine.settings, self.method, whole, fresh)
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
        wanted: int,
    ) -> None:
        expected: dict[tuple[int, float], Message] = {}
        orders = self._orders(state, clients, lr, attempt, transfers, found.charges)
        parcels = {id: order.parcel() for id, order in orders}
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
            if len(found.good) - len(too_far(found.good, self.rules.norm_factor)) >= wanted:
                break


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
