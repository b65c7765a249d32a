"""The rounds: who is asked, what travels, how replies become the next state. Knows no method by name.

A round is a function ``Progress -> Progress``: nothing is changed in place, so a round that fails or is retried leaves
the server state and every client's memory as they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fedspan.core.method import Memory, Method
from fedspan.core.tensors import Tensors
from fedspan.core.values import Client, Job, OptimizerState, ServerState, Trained
from fedspan.engines.accounting import Charge
from fedspan.engines.broadcast import Broadcast, travel
from fedspan.engines.changes import origin_of
from fedspan.engines.engine import Engine
from fedspan.engines.members import changeable
from fedspan.engines.outcomes import Beside, Failure, Transfer
from fedspan.engines.privacy import (
    order_charges,
    poisson_cohort,
    protected,
    reducer_for,
    round_charges,
    training_noise,
)
from fedspan.engines.reduction import Reducer
from fedspan.engines.sampling import cohort_of
from fedspan.engines.settings import RoundSettings
from fedspan.engines.work import Assignment
from fedspan.tasks.task import Examples

__all__ = [
    "Beside",
    "Failure",
    "Federation",
    "Member",
    "Progress",
    "RoundResult",
    "Transfer",
    "kept_moments",
]


@dataclass(frozen=True)
class Member:
    """A client of the simulation: what is known of it, and where its examples are.

    Args:
        client: its fixed facts (``held`` is kept in ``Progress``).
        train: indices of its training examples, int64.
        validation: of its validation examples.
        test: of its test examples.
    """

    client: Client
    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray


@dataclass(frozen=True)
class Progress:
    """All that a run knows between rounds; what a checkpoint holds.

    Args:
        state: the server's.
        memories: the clients', as of their last accepted reply.
        held: round of the last state that reached each client and whose reply was accepted.
        optimizers: kept moments by client and phase, with the generation that they belong to.
    """

    state: ServerState
    memories: Mapping[str, Memory] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    optimizers: Mapping[str, tuple[OptimizerState, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundResult:
    """What a round gave.

    Args:
        progress: after the round.
        transfers: in the order in which they happened.
        cohort: ids, sorted.
        lr: learning rate of the round.
        loss: mean training loss over the cohort's examples; NaN where nobody told.
        failures: whose replies did not count; nobody's in a simulation on one machine.
        charges: what it cost of privacy.
        late: of the cohort, those without whom there were enough good replies.
    """

    progress: Progress
    transfers: tuple[Transfer, ...]
    cohort: tuple[str, ...]
    lr: float
    loss: float
    failures: tuple[Failure, ...] = ()
    charges: tuple[Charge, ...] = ()
    late: tuple[str, ...] = ()


class Federation:
    """A method, an engine and the clients.

    Args:
        method: the method, with its wrappers.
        engine: trains jobs.
        members: the clients in any order, or by id in the ids' order (``OnDemand``).
        examples: what the members' indices point into.
        settings: rounds, cohort, seed.
    """

    def __init__(
        self,
        method: Method,
        engine: Engine,
        members: Sequence[Member] | Mapping[str, Member],
        examples: Examples,
        settings: RoundSettings,
    ) -> None:
        self.method = method
        self.engine = engine
        if not isinstance(members, Mapping):
            members = {member.client.id: member for member in sorted(members, key=lambda m: m.client.id)}
        self.members = members
        self.examples = examples
        self.settings = settings

    def remember(self, best: Progress) -> None:
        """The best progress so far, which may be asked for again; here all that it needs is in it."""

    def conclude(self, progress: Progress) -> tuple[Failure, ...]:
        """The end of the run, with the progress that is exported; those who could not do their part in it."""
        return ()

    def beside(self) -> Beside:
        """What happened beside the rounds since this was last asked; nothing where all clients are in this process."""
        return Beside()

    def remark(self) -> str | None:
        """What a user should know of the rounds once one was played; None: nothing."""
        return None

    def begin(self) -> Progress:
        """The progress before the first round."""
        return Progress(self.method.init(self.engine.adapted))

    def client(self, id: str, progress: Progress) -> Client:
        """A client with the round that it holds."""
        fixed = self.members[id].client
        return Client(fixed.id, fixed.rank, fixed.scaling, fixed.examples, fixed.weight, progress.held.get(id))

    def next_charges(self, progress: Progress) -> tuple[Charge, ...]:
        """What the next round will cost of privacy, of all who take part in it once."""
        state = progress.state
        charges = list(round_charges(self.settings, len(self.members)))
        known: dict[tuple[int, int], tuple[Charge, ...]] = {}
        for id in self.cohort(state.round) if self.settings.privacy is not None and not charges else ():
            client = replace(self.client(id, progress), held=None)
            kind = (client.rank, client.examples)
            if kind not in known:
                sent = self.method.sync(state, client)
                known[kind] = order_charges(self.settings.privacy, self.engine.settings, self.method, sent, client)
            charges += [replace(one, payer=id) for one in known[kind]]
        return tuple(charges)

    def cohort(self, round: int) -> tuple[str, ...]:
        """The clients asked in a round, sorted; drawn from (seed, round) alone, or from the key of central privacy."""
        return tuple(sorted(self.drawn(round)))

    def drawn(self, round: int, more: int = 0) -> list[str]:
        """The clients of a round and so many more, in the order in which they are drawn; in the ids', if it is all."""
        ids = list(self.members)
        size, privacy = self.settings.cohort, self.settings.privacy
        if privacy is not None and privacy.mechanism == "central":
            return [ids[at] for at in poisson_cohort(privacy, self.settings, len(ids), round)]
        return [ids[at] for at in cohort_of(self.settings.seed, round, len(ids), size, more)]

    def play(self, progress: Progress, on_client: Callable[[str, float], None] | None = None) -> RoundResult:
        """One round.

        Args:
            progress: before the round; left as it is.
            on_client: called with a client's id and training loss when it has finished.
        """
        state, training, privacy = progress.state, self.engine.settings, self.settings.privacy
        lr = training.lr(state.round, self.settings.rounds)
        ids = self.cohort(state.round)
        clients = {id: self.client(id, progress) for id in ids}
        reducer, broadcast = self._reducer(state, list(clients.values())), Broadcast()
        started: dict[str, Tensors] = {}
        noises: dict[str, float] = {}
        charges = list(round_charges(self.settings, len(self.members)))
        transfers: list[Transfer] = []
        memories, optimizers = changeable(progress.memories), changeable(progress.optimizers)
        self.engine.adapted.set_base(state.base)
        losses: dict[str, list[tuple[float, float]]] = {id: [] for id in ids}

        def assigned(id: str, job: Job) -> Assignment:
            kept = kept_moments(job, optimizers.get(_moments_key(id, job)), self.engine.settings.keep_optimizer)
            return Assignment(id, state.round, job, self.members[id].train, lr, kept, noises[id])

        def opened(id: str) -> Assignment:
            down = broadcast.travel(self.method.sync(state, clients[id]), id, transfers)
            memory = memories.get(id, {})
            charges.extend(order_charges(privacy, training, self.method, down, clients[id], memory))
            noises[id] = training_noise(training, self.method, down, clients[id], memory)
            job = self.method.start(down, clients[id], memory)
            if privacy is not None:
                started[id] = job.tensors
            return assigned(id, job)

        def finished(work: Assignment, trained: Trained) -> Assignment | None:
            id, job = work.client, work.job
            if self.engine.settings.keep_optimizer:
                optimizers[_moments_key(id, job)] = (trained.optimizer_state, job.generation)
            result, memory = self.method.finish(job, trained, clients[id], memories.get(id, {}))
            memories[id] = memory
            losses[id].append((trained.metrics["loss"], trained.metrics["examples"]))
            if on_client is not None:
                on_client(id, trained.metrics["loss"])
            if isinstance(result, Job):
                return assigned(id, result)
            if privacy is not None:
                result = protected(privacy, started.pop(id), clients[id], result, state.round)
            up = travel(result, id, "up", transfers)
            reducer.add(id, self.method.contribute(up, clients[id]))
            return None

        if ids:  # a Poisson sample may be empty
            self.engine.train_all(self.examples, {id: self._work(id) for id in ids}, opened, finished)
        transfers.sort(key=lambda transfer: (transfer.client, transfer.direction))
        parts = [part for id in ids for part in losses[id]]
        examples = sum(count for _, count in parts)
        after = Progress(
            state=self.method.update(state, reducer.result()),
            memories=memories,
            held={**progress.held, **dict.fromkeys(ids, state.round)},
            optimizers=optimizers,
        )
        loss = sum(loss * count for loss, count in parts) / examples if examples else math.nan
        return RoundResult(after, tuple(transfers), ids, lr, loss, charges=tuple(charges))

    def _reducer(self, state: ServerState, cohort: Sequence[Client]) -> Reducer:
        """The round's reducer."""

        def origin() -> Tensors:
            fresh = replace(self.members[next(iter(self.members))].client, held=None)
            return origin_of(self.method, self.method.sync(state, fresh), fresh)

        return reducer_for(self.settings, cohort, len(self.members), state.round, origin)

    def _work(self, id: str) -> int:
        """About how much a client has to train, in tokens an epoch."""
        return int(self.examples.lengths[self.members[id].train].sum())


def kept_moments(job: Job, kept: tuple[OptimizerState, int] | None, wanted: bool) -> OptimizerState | None:
    """The moments that a job goes on with: those kept of its phase, unless its tensors were begun anew since then."""
    return None if kept is None or not wanted or kept[1] != job.generation else kept[0]


def _moments_key(client: str, job: Job) -> str:
    """Moments are kept by phase: those of a probe mean nothing to the training after it."""
    return f"{client}/{job.phase}"
