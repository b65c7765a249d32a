"""The server half of rounds: selects clients, makes orders, aggregates replies. Knows no method by name.

A round is a function ``Progress -> Progress``: nothing is changed in place, so a round that fails or is retried leaves
the server state and every client's memory as they were. Whether the clients are in this process or on other machines is
the transport's business, and whether the server sees their replies or only sums of them the aggregation's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from fedspan.core.method import Method
from fedspan.core.values import Client, Message, Reduced, ServerState
from fedspan.engines import wire
from fedspan.engines.accounting import Charge
from fedspan.engines.aggregation import Aggregating, Aggregation, PlainAggregation, Setting, Tally, TooFew
from fedspan.engines.asking import Asking, Forgot, OnTrained, Orders, Transport, opened
from fedspan.engines.engine import Engine
from fedspan.engines.host import Host
from fedspan.engines.in_process import InProcess, ProgressStore
from fedspan.engines.outcomes import Beside, Failure, Purpose, Transfer
from fedspan.engines.parcels import Masking, Parcel
from fedspan.engines.privacy import order_charges, poisson_cohort, round_charges
from fedspan.engines.progress import Member, Progress, RoundResult
from fedspan.engines.sampling import cohort_of
from fedspan.engines.screening import ReplyRules
from fedspan.engines.settings import RoundSettings
from fedspan.errors import FedspanError
from fedspan.tasks.task import Examples

__all__ = ["Beside", "Failure", "Federation", "Member", "Progress", "RoundResult", "Transfer"]

IN_PROCESS = ReplyRules(retries=0, norm_factor=None, validate=False)
"""Rules for clients in this process."""


class Federation:
    """A method, an engine, the clients, and the way to them.

    Args:
        method: The method, with its wrappers.
        engine: Has the model, for ``init`` and the export; trains too, where the clients are in this process.
        members: The clients in any order, or by id in the ids' order (``OnDemand``).
        examples: What the members' indices point into; the server's own, where clients are elsewhere.
        settings: Rounds, cohort, reduction, privacy, seed.
        transport: The way to the clients; None: they are in this process.
        rules: When a round stands.
        aggregating: Makes the aggregation of a round.
        run: The run's name, for nodes that may know several.
        exporting: Whether clients export their own models, because the server does not see them.
    """

    def __init__(
        self,
        method: Method,
        engine: Engine,
        members: Sequence[Member] | Mapping[str, Member],
        examples: Examples,
        settings: RoundSettings,
        transport: Transport | None = None,
        rules: ReplyRules | None = None,
        aggregating: Aggregating = PlainAggregation,
        run: str = "",
        exporting: bool = False,
    ) -> None:
        self.method = method
        self.engine = engine
        if not isinstance(members, Mapping):
            members = {member.client.id: member for member in sorted(members, key=lambda m: m.client.id)}
        self.members = members
        self.examples = examples
        self.settings = settings
        self.transport, self.rules, self.aggregating = transport, rules or IN_PROCESS, aggregating
        self.run, self.exporting = run, exporting
        self._best: Mapping[str, int] = {}
        self._transfers: list[Transfer] = []
        self._failures: list[Failure] = []
        self._remark: str | None = None

    def remember(self, best: Progress) -> None:
        """Note the best progress so far: clients must not delete what belongs to it."""
        self._best = best.held

    def remark(self) -> str | None:
        """What a user should know of the rounds once one was run; None: nothing."""
        return self._remark

    def begin(self) -> Progress:
        """The progress before the first round."""
        return Progress(self.method.init(self.engine.adapted))

    def client(self, id: str, progress: Progress) -> Client:
        """A client with the round that it holds."""
        return replace(self.members[id].client, held=progress.held.get(id))

    def next_charges(self, progress: Progress) -> tuple[Charge, ...]:
        """The privacy cost of the next round, if every client is asked once."""
        state = progress.state
        charges = list(round_charges(self.settings, len(self.members)))
        known: dict[tuple[int, int], tuple[Charge, ...]] = {}
        for id in self.cohort(state.round) if self.settings.privacy is not None and not charges else ():
            client = self.members[id].client
            kind = (client.rank, client.examples)
            if kind not in known:
                known[kind] = self._charges(state, client)
            charges += [replace(one, payer=id) for one in known[kind]]
        return tuple(charges)

    def _charges(self, state: ServerState, client: Client) -> tuple[Charge, ...]:
        """The privacy cost of an order to train; the same whatever the client holds."""
        fresh = replace(client, held=None)
        sent = self.method.sync(state, fresh)
        return order_charges(self.settings.privacy, self.engine.settings, self.method, sent, fresh)

    def cohort(self, round: int) -> tuple[str, ...]:
        """The clients asked in a round, sorted; drawn from (seed, round) alone, or from the key of central privacy."""
        return tuple(sorted(self.drawn(round, self.rules.over_select)))

    def drawn(self, round: int, more: int = 0) -> list[str]:
        """The clients of a round and so many more, in the order in which they are drawn; in the ids', if it is all."""
        ids = list(self.members)
        size, privacy = self.settings.cohort, self.settings.privacy
        if privacy is not None and privacy.mechanism == "central":
            return [ids[at] for at in poisson_cohort(privacy, self.settings, len(ids), round)]
        return [ids[at] for at in cohort_of(self.settings.seed, round, len(ids), size, more)]

    def play(
        self,
        progress: Progress,
        on_client: Callable[[str, float], None] | None = None,
        on_trained: OnTrained | None = None,
    ) -> RoundResult:
        """Run one round; clients that failed are asked again, as often as the rules allow, if too few replies count.

        Args:
            progress: The progress before the round; left as it is.
            on_client: Called with a client's id and training loss when its reply counts.
            on_trained: Called with every job that a client in this process has trained.

        Raises:
            FedspanError: If too few replies count in the end; the progress is what it was.
        """
        state, transport, rules = progress.state, self._way(), self.rules
        ids, held = self.cohort(state.round), dict(progress.held)
        wanted = len(self.drawn(state.round))
        drawn = tuple(self.drawn(state.round, rules.over_select))
        tally, charges = Tally(), list(round_charges(self.settings, len(self.members)))
        aggregation = self.aggregating(
            Setting(
                self.method,
                self.settings,
                self.members,
                state,
                ids,
                drawn,
                wanted,
                rules,
                transport,
                self.run,
            ),
            tally,
        )
        transport.begin(progress, on_trained)
        for attempt in range(rules.retries + 1):
            clients = {id: self.client(id, replace(progress, held=held)) for id in aggregation.missing()}
            try:
                masks = aggregation.open(clients, attempt)
                self._train(transport, state, clients, masks, attempt, aggregation, tally, charges, on_client)
                reduced = aggregation.close(attempt)
            except TooFew:
                continue
            finally:
                for id in tally.lost:
                    held.pop(id, None)
            self._remark = aggregation.remark()
            failed = {failure.client for failure in tally.failures if failure.attempt == attempt}
            late = tuple(id for id in ids if id not in aggregation.answers and id not in failed)
            return self._concluded(transport, state, held, reduced, aggregation, tally, charges, late)
        raise _too_few(aggregation.good(), tally.failures, aggregation.quorum, state.round, ids)

    def _way(self) -> Transport:
        """The transport; where the clients are in this process, to a host with all of them."""
        if self.transport is not None:
            return self.transport
        store = ProgressStore(Progress(ServerState()))
        return InProcess(
            Host(self.method, self.engine, self.members, self.examples, store, batch_size=1, reveals_losses=True)
        )

    def _train(
        self,
        transport: Transport,
        state: ServerState,
        clients: Mapping[str, Client],
        masks: Mapping[str, Masking | None],
        attempt: int,
        aggregation: Aggregation,
        tally: Tally,
        charges: list[Charge],
        on_client: Callable[[str, float], None] | None,
    ) -> None:
        """Have clients train, and pass on what they reply."""
        asking, lr = Asking(self.run), self.engine.settings.lr(state.round, self.settings.rounds)

        def order(id: str) -> Parcel:
            message = self.method.sync(state, clients[id])
            made = asking.order("train", state.round, id, clients[id], message)
            tally.transfers.append(_transfer(id, made.body, message))
            if self.settings.privacy is not None and self.settings.privacy.mechanism != "central":
                charges.extend(self._charges(state, clients[id]))
            return replace(made, attempt=attempt, lr=lr, best=self._best.get(id), secure=masks[id]).parcel()

        def replied(id: str, back: Parcel | str) -> bool:
            try:
                answer = opened(back)
                enough = aggregation.take(clients[id], answer, attempt)
            except ValueError as error:
                tally.failures.append(Failure(id, attempt, str(error)))
                if isinstance(error, Forgot):
                    tally.lost.add(id)
                return False
            if on_client is not None:
                on_client(id, answer.parts[-1].loss if answer.parts else float("nan"))
            return enough

        orders = Orders("train", masks, order)
        transport.exchange(orders, replied, self.rules.deadline, patient=attempt > 0)

    def _concluded(
        self,
        transport: Transport,
        state: ServerState,
        held: Mapping[str, int],
        reduced: Reduced,
        aggregation: Aggregation,
        tally: Tally,
        charges: Sequence[Charge],
        late: Sequence[str],
    ) -> RoundResult:
        """The end of a round that stands."""
        ids = self.cohort(state.round)
        answers = {id: aggregation.answers[id] for id in ids if id in aggregation.answers}
        parts = [part for answer in answers.values() for part in answer.parts]
        examples = sum(part.examples for part in parts)
        tally.transfers.sort(key=lambda transfer: (transfer.client, transfer.direction))
        memories, optimizers = transport.stored()
        after = Progress(
            state=self.method.update(state, reduced),
            memories=memories,
            held={**held, **dict.fromkeys(answers, state.round)},
            optimizers=optimizers,
        )
        lr = self.engine.settings.lr(state.round, self.settings.rounds)
        loss = sum(part.loss * part.examples for part in parts) / examples if examples else math.nan
        return RoundResult(
            after, tuple(tally.transfers), ids, lr, loss, tuple(tally.failures), tuple(charges), tuple(late)
        )

    def conclude(self, progress: Progress) -> tuple[Failure, ...]:
        """End the run: of a method with personal models, every client exports its own, if the server can't see it.

        Args:
            progress: The progress that is exported.

        Returns:
            The clients that failed to.
        """
        if self.transport is None or not self.exporting or not self.method.declared().personal:
            return ()
        state, asking = progress.state, Asking(self.run)
        failures: list[Failure] = []

        def order(id: str) -> Parcel:
            client = self.client(id, progress)
            message = self.method.sync(state, client)
            made = asking.order("export", state.round, id, client, message)
            self.note(_transfer(id, made.body, message, "export"))
            return made.parcel()

        def replied(id: str, back: Parcel | str) -> bool:
            try:
                opened(back)
            except ValueError as error:
                failures.append(Failure(id, 0, str(error), "export"))
            return False

        self.transport.exchange(Orders("export", self.members, order), replied, self.rules.deadline)
        return tuple(failures)

    def note(self, happened: Transfer | Failure) -> None:
        """Add to what happened beside the rounds."""
        if isinstance(happened, Transfer):
            self._transfers.append(happened)
        else:
            self._failures.append(happened)

    def beside(self) -> Beside:
        """What happened beside the rounds since this was last called."""
        taken = Beside(tuple(self._transfers), tuple(self._failures))
        self._transfers.clear()
        self._failures.clear()
        return taken


def _transfer(id: str, body: bytes, message: Message, purpose: Purpose = "train") -> Transfer:
    """An order as the ledger counts it."""
    return Transfer(id, "down", len(body), wire.payload_size(message), purpose)


def _too_few(
    good: Collection[str], failures: Sequence[Failure], quorum: int, round: int, ids: Sequence[str]
) -> FedspanError:
    """The error of a round that does not stand.

    Args:
        good: Clients whose replies would count.
        failures: Failures of the others.
        quorum: Replies that the round needs.
        round: Number of the round, from 0.
        ids: Ids of the selected clients.
    """
    last = {failure.client: failure.reason for failure in failures}
    reasons = "; ".join(f"{id}: {last.get(id, 'no reply')}" for id in ids if id not in good)
    expected = (
        f"at least {quorum} of {len(ids)} clients in round {round + 1} ({reasons}); the state before the round is "
        "kept: put it right and resume"
    )
    return FedspanError("good replies", len(good), expected)
