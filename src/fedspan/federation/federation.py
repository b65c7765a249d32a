"""A federation runs rounds of a method with its clients over a transport. It knows no method by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedspan.core.method import Method
from fedspan.core.values import Client
from fedspan.federation.aggregation.aggregation import AggregationFactory, RoundContext
from fedspan.federation.aggregation.plaintext import PlaintextAggregation
from fedspan.federation.orders import OnTrained, OrderEncoder, Orders, Transport, open_reply
from fedspan.federation.outcomes import Failure, OutOfRoundEvents, Transfer
from fedspan.federation.privacy import expected_charges, poisson_cohort, round_charges
from fedspan.federation.progress import ClientData, Progress, RoundResult
from fedspan.federation.protocol import Envelope
from fedspan.federation.round import OnClient, Round, order_transfer
from fedspan.federation.sampling import cohort_of
from fedspan.federation.settings import RoundSettings
from fedspan.federation.validation import ReplyRules
from fedspan.tasks.task import Examples
from fedspan.training.accounting import Charge
from fedspan.training.engine import Engine

__all__ = ["Federation", "clients_by_id"]

STRICT = ReplyRules(retries=0, norm_factor=None, validate=False)
"""Rules for trusted clients in this process: every reply is accepted."""


class Federation:
    """A method, an engine, the clients and the transport to them.

    Args:
        method: The method, with its wrappers.
        engine: Holds the model for ``init`` and the export; trains, too, if the clients are in this process.
        clients: The clients in any order, or by sorted id (``LazyMapping``).
        examples: The examples that the clients' indices refer to; the server's own if clients are on other machines.
        settings: Rounds, cohort, reduction, privacy, seed.
        transport: Transport to the clients.
        rules: Rules for accepting replies and the round; None: every selected client has to reply.
        aggregating: Creates the aggregation of a round.
        run: Name of the run, for nodes that take part in several.
        exporting: Whether clients export their own models because the server does not see them.
    """

    def __init__(
        self,
        method: Method,
        engine: Engine,
        clients: Sequence[ClientData] | Mapping[str, ClientData],
        examples: Examples,
        settings: RoundSettings,
        transport: Transport,
        rules: ReplyRules | None = None,
        aggregating: AggregationFactory = PlaintextAggregation,
        run: str = "",
        exporting: bool = False,
    ) -> None:
        self.method = method
        self.engine = engine
        self.clients = clients_by_id(clients)
        self.examples = examples
        self.settings = settings
        self.transport, self.rules, self.aggregating = transport, rules or STRICT, aggregating
        self.run, self.exporting = run, exporting
        self._best: Mapping[str, int] = {}
        self._transfers: list[Transfer] = []
        self._failures: list[Failure] = []
        self._remark: str | None = None

    def remember(self, best: Progress) -> None:
        """Record the best progress so far: clients must not delete the state that belongs to it."""
        self._best = best.held

    def remark(self) -> str | None:
        """Return a remark on the rounds for the user, available after the first round; None: no remark."""
        return self._remark

    def begin(self) -> Progress:
        """Return the progress before the first round."""
        return Progress(self.method.init(self.engine.adapted))

    def client(self, id: str, progress: Progress) -> Client:
        """Return a client with the round of the state that it stores."""
        return replace(self.clients[id].client, held=progress.held.get(id))

    def next_charges(self, progress: Progress) -> tuple[Charge, ...]:
        """Return the privacy cost of the next round if every client is selected once."""
        state = progress.state
        charges = list(round_charges(self.settings, len(self.clients)))
        known: dict[tuple[int, int], tuple[Charge, ...]] = {}
        for id in self.cohort(state.round) if self.settings.privacy is not None and not charges else ():
            client = self.clients[id].client
            kind = (client.rank, client.examples)
            if kind not in known:
                known[kind] = expected_charges(self.settings.privacy, self.engine.settings, self.method, state, client)
            charges += [replace(one, payer=id) for one in known[kind]]
        return tuple(charges)

    def cohort(self, round: int) -> tuple[str, ...]:
        """Return a round's selected clients, sorted; drawn from (seed, round) alone or the key of central privacy."""
        return tuple(sorted(self.drawn(round, self.rules.over_select)))

    def drawn(self, round: int, more: int = 0) -> list[str]:
        """Return a round's clients and ``more`` additional ones in the order of drawing; by id if all are selected."""
        ids = list(self.clients)
        size, privacy = self.settings.cohort, self.settings.privacy
        if privacy is not None and privacy.mechanism == "central":
            return [ids[at] for at in poisson_cohort(privacy, self.settings, len(ids), round)]
        return [ids[at] for at in cohort_of(self.settings.seed, round, len(ids), size, more)]

    def run_round(
        self,
        progress: Progress,
        on_client: OnClient | None = None,
        on_trained: OnTrained | None = None,
    ) -> RoundResult:
        """Run one round; if too few replies are accepted, retry failed clients as often as the rules allow.

        Args:
            progress: The progress before the round, which is not modified.
            on_client: Called with a client's id and training loss when its reply is accepted.
            on_trained: Called with every job that a client in this process trained.

        Raises:
            FedspanError: If too few replies are accepted after all attempts; the progress is unchanged.
        """
        state = progress.state
        context = RoundContext(
            method=self.method,
            settings=self.settings,
            training=self.engine.settings,
            clients=self.clients,
            state=state,
            ids=self.cohort(state.round),
            drawn=tuple(self.drawn(state.round, self.rules.over_select)),
            wanted=len(self.drawn(state.round)),
            rules=self.rules,
            transport=self.transport,
            run=self.run,
        )
        round = Round(context, self.aggregating, progress.held, self._best, on_client)
        self.transport.begin(progress, on_trained)
        result = round.run()
        self._remark = round.aggregation.remark()
        return result

    def conclude(self, progress: Progress) -> tuple[Failure, ...]:
        """End the run: have clients export their personal models if the server cannot see them.

        Args:
            progress: The progress to export.

        Returns:
            The failures of the clients that did not export.
        """
        if not self.exporting or not self.method.declared().personal:
            return ()
        state, asking = progress.state, OrderEncoder(self.run)
        failures: list[Failure] = []

        def order(id: str) -> Envelope:
            client = self.client(id, progress)
            message = self.method.sync(state, client)
            made = asking.order("export", state.round, id, client, message)
            self.note(order_transfer(id, made.body, message, "export"))
            return made.envelope()

        def replied(id: str, back: Envelope | str) -> bool:
            try:
                open_reply(back)
            except ValueError as error:
                failures.append(Failure(id, 0, str(error), "export"))
            return False

        self.transport.exchange(Orders("export", self.clients, order), replied, self.rules.deadline)
        return tuple(failures)

    def note(self, happened: Transfer | Failure) -> None:
        """Record an event outside the rounds."""
        if isinstance(happened, Transfer):
            self._transfers.append(happened)
        else:
            self._failures.append(happened)

    def beside(self) -> OutOfRoundEvents:
        """Return the events outside the rounds since the last call."""
        taken = OutOfRoundEvents(tuple(self._transfers), tuple(self._failures))
        self._transfers.clear()
        self._failures.clear()
        return taken


def clients_by_id(members: Sequence[ClientData] | Mapping[str, ClientData]) -> Mapping[str, ClientData]:
    """Return the clients by sorted id; a mapping is already in that order."""
    if isinstance(members, Mapping):
        return members
    return {member.client.id: member for member in sorted(members, key=lambda member: member.client.id)}
