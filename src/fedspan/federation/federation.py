"""A federation and its rounds: sampling, attempts with deadlines, aggregation and the update."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any

import torch

from fedspan.core.method import Method
from fedspan.core.tensors import create_generator
from fedspan.core.values import Client
from fedspan.federation.absences import Absences
from fedspan.federation.arrival_sources import OnOrder
from fedspan.federation.buffered import BufferedRound
from fedspan.federation.config import RoundSettings
from fedspan.federation.presence import Presence
from fedspan.federation.privacy import compute_round_charges, draw_poisson_cohort
from fedspan.federation.progress import ClientData, Failure, OutOfRoundEvents, Progress, RoundResult, Transfer
from fedspan.federation.protocol import Reply
from fedspan.federation.round import OnCharge, OnClient, OnFailure, Round, compute_client_charges, exchange_model
from fedspan.federation.round_context import RoundContext
from fedspan.federation.transport import OnTrained, Transport
from fedspan.tasks.task import Examples
from fedspan.training.accounting import Charge
from fedspan.training.config import TrainingSettings
from fedspan.training.engine import Engine
from fedspan.training.stages import StageName, Stages


def draw_cohort(seed: int, round: int, clients: int, size: int | None, extra: int = 0) -> list[int]:
    """Draw the positions of a round's clients and of ``extra`` more, in order of drawing; all, sorted, if all."""
    if size is None or size >= clients:
        return list(range(clients))
    return torch.randperm(clients, generator=create_generator(seed, "cohort", round))[: size + extra].tolist()


class Federation:
    """A method, an engine, the clients and the transport to them.

    Args:
        engine: Holds the model for ``init`` and the export; trains, too, if the clients are in this process.
        clients: The clients in any order, or by sorted id (``LazyMapping``).
        examples: The examples that the clients' indices refer to; the server's own if clients are on other machines.
        exporting: Whether clients export their own models because the server does not see them.
        training: Settings of local training, from which orders take the learning rate; None: the engine's.
        presence: The rounds in which each client is present; None: every client in every round.
        begin_round: Decides before a round, given its number from 0, which clients the federation has and when each is
            present; None: both stay.
    """

    def __init__(
        self,
        method: Method,
        engine: Engine,
        clients: Sequence[ClientData] | Mapping[str, ClientData],
        examples: Examples,
        settings: RoundSettings,
        transport: Transport,
        run: str = "",
        exporting: bool = False,
        training: TrainingSettings | None = None,
        presence: Presence | None = None,
        begin_round: Callable[[int], tuple[Mapping[str, ClientData], Presence]] | None = None,
    ) -> None:
        self.method = method
        self.engine = engine
        self.clients = sort_clients(clients)
        self.examples = examples
        self.settings = settings
        self.transport = transport
        self.run, self.exporting = run, exporting
        self.training = training or engine.settings
        self.presence, self._begin_round = presence or Presence(), begin_round
        self._begin()

    def _begin(self) -> None:
        self._best: Mapping[str, int] = {}
        self._transfers: list[Transfer] = []
        self._failures: list[Failure] = []
        self._note: str | None = None
        self._absences = Absences(self.draw_cohort)

    def replace_training(self, training: TrainingSettings) -> Federation:
        """Return the federation with other settings of local training, over the same transport."""
        return self._replace(training=training)

    def replace_transport(self, transport: Transport) -> Federation:
        """Return the federation over another transport to the same clients."""
        return self._replace(transport=transport)

    def _replace(self, **parts: Any) -> Federation:
        replaced = copy(self)
        vars(replaced).update(parts)
        replaced._begin()
        return replaced

    def begin_round(self, round: int) -> None:
        """Update the clients before a round, from 0, if clients join and leave between rounds."""
        if self._begin_round is not None:
            clients, self.presence = self._begin_round(round)
            self.clients = sort_clients(clients)

    def retain(self, best: Progress) -> None:
        """Record the best progress so far: clients must not delete the state that belongs to it."""
        self._best = best.last_rounds

    def get_note(self) -> str | None:
        """Return a note on the rounds for the user, available after the first round; None: no note."""
        return self._note

    def begin(self) -> Progress:
        """Return the progress before the first round."""
        return Progress(self.method.init(self.engine.adapted))

    def get_client(self, id: str, progress: Progress) -> Client:
        """Return a client with the round of the state that it stores."""
        return replace(self.clients[id].client, last_round=progress.last_rounds.get(id))

    def compute_next_charges(self, progress: Progress) -> tuple[Charge, ...]:
        """Return the privacy cost of the next round if every client is selected once."""
        charges = compute_round_charges(self.settings, len(self.clients))
        if self.settings.privacy is None or charges:
            return charges
        context = self._build_context(progress)
        by_client = compute_client_charges(context, {id: self.clients[id].client for id in context.ids})
        return tuple(charge for costs in by_client.values() for charge in costs)

    def draw_cohort(self, round: int) -> tuple[str, ...]:
        """Return a round's selected clients, sorted; drawn from (seed, round) alone or the key of central privacy."""
        return tuple(sorted(self.select_clients(round, self.settings.over_select)))

    def list_present(self, round: int) -> list[str]:
        """Return the clients that are present in a round, from 0, sorted."""
        return self.presence.select_present(self.clients, round)

    def list_last_present(self, progress: Progress) -> list[str]:
        """Return the clients that were present in the last finished round, or are in the first one, sorted."""
        return self.list_present(max(progress.state.round - 1, 0))

    def select_clients(self, round: int, extra: int = 0) -> list[str]:
        """Return a round's clients and ``extra`` additional ones in the order of drawing; by id if all are selected."""
        ids = self.list_present(round)
        size, privacy = self.settings.clients_per_round, self.settings.central
        if privacy is not None:
            return [ids[index] for index in draw_poisson_cohort(privacy, self.settings, len(ids), round)]
        return [ids[index] for index in draw_cohort(self.settings.seed, round, len(ids), size, extra)]

    def run_round(
        self,
        progress: Progress,
        on_client: OnClient | None = None,
        on_trained: OnTrained | None = None,
        on_charge: OnCharge | None = None,
        on_failure: OnFailure | None = None,
        on_order: OnOrder | None = None,
    ) -> RoundResult:
        """Run one round; if too few replies are accepted, retry failed clients as often as the settings allow.

        Args:
            on_client: Called with a client's id and training loss when its reply is accepted; in asynchronous rounds,
                when it arrives.
            on_charge: Called with the privacy cost of each attempt before its orders are sent.
            on_failure: Called with a client's id and a reason when its reply is rejected or does not arrive.
            on_order: Called in asynchronous rounds with each client that has an order, or receives one.

        Raises:
            FedspanError: If too few replies are accepted after all attempts; the progress is unchanged.
        """
        self.begin_round(progress.state.round)
        if self.settings.buffered is not None:
            return self._run_buffered_round(progress, on_trained, on_client, on_failure, on_order)
        context = self._build_context(progress)
        added = sum(self.method.list_added_epochs())
        units = {id: self.training.compute_workload(self.clients[id].client.examples, added) for id in context.ids}
        with open_clients_stage(self.engine.stages, "training", units) as advance:

            def report_client(id: str, loss: float) -> None:
                advance(id)
                if on_client is not None:
                    on_client(id, loss)

            round = Round(context, progress, self._best, report_client, on_charge, on_failure)
            self.transport.begin(progress, on_trained)
            result = round.run()
        self._note = round.aggregation.get_note()
        return result

    def _run_buffered_round(
        self,
        progress: Progress,
        on_trained: OnTrained | None,
        on_client: OnClient | None,
        on_failure: OnFailure | None,
        on_order: OnOrder | None,
    ) -> RoundResult:
        """Run one asynchronous round (``run_round``)."""
        context = self._build_context(progress, ())
        with self.engine.stages.stage("training"):  # it is not known which clients will reply
            self.transport.begin(progress, on_trained)
            round = BufferedRound(context, progress, self._best, on_client, on_failure, on_order)
            result = round.run()
        self._note = round.note
        return result

    def _build_context(self, progress: Progress, ids: tuple[str, ...] | None = None) -> RoundContext:
        """Return the definition of the next round; its cohort is drawn unless it is given."""
        state, settings = progress.state, self.settings
        self.presence.require_enough(len(self.clients), state.round, settings.min_replies)
        ids = self.draw_cohort(state.round) if ids is None else ids
        return RoundContext(
            method=self.method,
            settings=settings,
            training=self.training,
            clients=self.clients,
            state=state,
            ids=ids,
            draw_order=tuple(self.select_clients(state.round, settings.over_select)),
            target=len(self.select_clients(state.round)),
            absent=self.find_absent(progress, ids),
            transport=self.transport,
            run=self.run,
        )

    def find_absent(self, progress: Progress, ids: Iterable[str]) -> frozenset[str]:
        """Return the clients among ``ids`` that the next round does not wait for: their last replies did not count."""
        if self.settings.buffered is not None:
            return frozenset()  # cohorts are not drawn, and no round waits for a certain client
        limit = None if self.settings.over_select else self.settings.max_missed_rounds
        last_replies = (
            {**progress.last_replies, **progress.last_rounds} if progress.last_replies else progress.last_rounds
        )
        return self._absences.find(progress.state.round, ids, last_replies, limit)

    def conclude(self, progress: Progress) -> tuple[Failure, ...]:
        """End the run: have clients export their personal models if the server cannot see them.

        Returns:
            The failures of the clients that did not export.
        """
        if not self.exporting or not self.method.declare_claims().personal:
            return ()
        failures: list[Failure] = []

        def record_failure(id: str, reply: Reply | str) -> bool:
            if isinstance(reply, str):
                failures.append(Failure(id, 0, reply, "export"))
            return False

        exchange_model(
            "export",
            self.method,
            progress.state,
            self.list_last_present(progress),
            lambda id: self.get_client(id, progress),
            self.transport,
            run=self.run,
            seconds=self.settings.deadline,
            on_order=self.record,
            on_reply=record_failure,
        )
        return tuple(failures)

    def record(self, event: Transfer | Failure) -> None:
        """Record an event outside the rounds."""
        if isinstance(event, Transfer):
            self._transfers.append(event)
        else:
            self._failures.append(event)

    def pop_events(self) -> OutOfRoundEvents:
        """Return the events outside the rounds since the last call."""
        events = OutOfRoundEvents(tuple(self._transfers), tuple(self._failures))
        self._transfers.clear()
        self._failures.clear()
        return events


@contextmanager
def open_clients_stage(stages: Stages, name: StageName, units: Mapping[str, int]) -> Generator[Callable[[str], None]]:
    """Open a stage of clients' work, and yield a function to call with each client whose reply is accepted.

    Engines in this process count every batch; of clients elsewhere only their replies are seen.
    """
    done: set[str] = set()

    def advance(id: str) -> None:
        done.add(id)
        stages.reach(name, sum(map(units.__getitem__, done)))

    with stages.stage(name, sum(units.values())):
        yield advance


def sort_clients(clients: Sequence[ClientData] | Mapping[str, ClientData]) -> Mapping[str, ClientData]:
    """Return the clients by sorted id; a mapping is already in that order."""
    if isinstance(clients, Mapping):
        return clients
    return {data.client.id: data for data in sorted(clients, key=lambda data: data.client.id)}
