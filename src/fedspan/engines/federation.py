"""The rounds: who is asked, what travels, how replies become the next state. Knows no method by name.

A round is a function ``Progress -> Progress``: nothing is changed in place, so a round that fails or is retried leaves
the server state and every client's memory as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch

from fedspan.core.method import Memory, Method
from fedspan.core.tensors import generator
from fedspan.core.values import Client, Job, Message, OptimizerState, ServerState, Trained
from fedspan.engines import wire
from fedspan.engines.engine import Engine
from fedspan.engines.members import changeable
from fedspan.engines.robust import reducer_for
from fedspan.engines.settings import RoundSettings
from fedspan.engines.work import Assignment
from fedspan.tasks.task import Examples

__all__ = ["Failure", "Federation", "Member", "Progress", "RoundResult", "Transfer", "kept_moments", "the_very_same"]

Direction = Literal["down", "up"]


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
class Transfer:
    """One message that travelled.

    Args:
        client: id.
        direction: ``down`` or ``up``.
        bytes: serialized size.
        payload: bytes of tensor data in it.
    """

    client: str
    direction: Direction
    bytes: int
    payload: int


@dataclass(frozen=True)
class Failure:
    """A client whose reply does not count in a round.

    Args:
        client: id.
        attempt: of the round, from 0.
        reason: in words.
    """

    client: str
    attempt: int
    reason: str


@dataclass(frozen=True)
class RoundResult:
    """What a round gave.

    Args:
        progress: after the round.
        transfers: in the order in which they happened.
        cohort: ids, sorted.
        lr: learning rate of the round.
        loss: mean training loss over the cohort's examples.
        failures: whose replies did not count; nobody's in a simulation on one machine.
    """

    progress: Progress
    transfers: tuple[Transfer, ...]
    cohort: tuple[str, ...]
    lr: float
    loss: float
    failures: tuple[Failure, ...] = ()


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

    def note(self) -> str | None:
        """What a user should know of the rounds once one was played; None: nothing."""
        return None

    def begin(self) -> Progress:
        """The progress before the first round."""
        return Progress(self.method.init(self.engine.adapted))

    def client(self, id: str, progress: Progress) -> Client:
        """A client with the round that it holds."""
        fixed = self.members[id].client
        return Client(fixed.id, fixed.rank, fixed.scaling, fixed.examples, fixed.weight, progress.held.get(id))

    def cohort(self, round: int) -> tuple[str, ...]:
        """The clients asked in a round, sorted; drawn from (seed, round) alone."""
        ids = list(self.members)
        size = self.settings.cohort
        if size is None or size >= len(ids):
            return tuple(ids)
        rng = generator(self.settings.seed, "cohort", round)
        chosen = torch.randperm(len(ids), generator=rng)[:size].tolist()
        return tuple(sorted(ids[index] for index in chosen))

    def play(self, progress: Progress, on_client: Callable[[str, float], None] | None = None) -> RoundResult:
        """One round.

        Args:
            progress: before the round; left as it is.
            on_client: called with a client's id and training loss when it has finished.
        """
        state = progress.state
        lr = self.engine.settings.lr(state.round, self.settings.rounds)
        ids = self.cohort(state.round)
        clients = {id: self.client(id, progress) for id in ids}
        reducer, broadcast = reducer_for(self.settings, list(clients.values())), _Broadcast()
        transfers: list[Transfer] = []
        memories, optimizers = changeable(progress.memories), changeable(progress.optimizers)
        self.engine.adapted.set_base(state.base)
        losses: dict[str, list[tuple[float, float]]] = {id: [] for id in ids}

        def assigned(id: str, job: Job) -> Assignment:
            kept = kept_moments(job, optimizers.get(_moments_key(id, job)), self.engine.settings.keep_optimizer)
            return Assignment(id, state.round, job, self.members[id].train, lr, kept)

        def opened(id: str) -> Assignment:
            down = broadcast.travel(self.method.sync(state, clients[id]), id, transfers)
            job = self.method.start(down, clients[id], memories.get(id, {}))
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
            up = _travel(result, id, "up", transfers)
            reducer.add(id, self.method.contribute(up, clients[id]))
            return None

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
        loss = sum(loss * count for loss, count in parts) / max(1.0, examples)
        return RoundResult(after, tuple(transfers), ids, lr, loss)

    def _work(self, id: str) -> int:
        """About how much a client has to train, in tokens an epoch."""
        return int(self.examples.lengths[self.members[id].train].sum())


def kept_moments(job: Job, kept: tuple[OptimizerState, int] | None, wanted: bool) -> OptimizerState | None:
    """The moments that a job goes on with: those kept of its phase, unless its tensors were begun anew since then."""
    return None if kept is None or not wanted or kept[1] != job.generation else kept[0]


def _travel(message: Message, client: str, direction: Direction, transfers: list[Transfer]) -> Message:
    """Through the wire format and back: what is counted is what arrives, and nothing else arrives."""
    data = wire.encode(message)
    transfers.append(Transfer(client, direction, len(data), wire.payload_size(message)))
    return wire.decode(data)


class _Broadcast:
    """What goes down, encoded once for all clients in a row that are sent the very same tensors."""

    def __init__(self) -> None:
        self._sent: Message | None = None
        self._arrived = Message()
        self._transfers: list[Transfer] = []

    def travel(self, message: Message, client: str, transfers: list[Transfer]) -> Message:
        """``_travel`` downwards; the tensors that arrive may be those that arrived at others."""
        if self._sent is None or not the_very_same(message, self._sent):
            self._transfers.clear()
            self._sent, self._arrived = message, _travel(message, client, "down", self._transfers)
        transfers.append(replace(self._transfers[0], client=client))
        return replace(self._arrived, tensors=dict(self._arrived.tensors))


def the_very_same(one: Message, other: Message) -> bool:
    """Whether two messages hold the same tensor objects, so that one encoding serves both."""
    same = one.base is other.base and one.scalars == other.scalars and one.tensors.keys() == other.tensors.keys()
    return same and all(value is other.tensors[name] for name, value in one.tensors.items())


def _moments_key(client: str, job: Job) -> str:
    """Moments are kept by phase: those of a probe mean nothing to the training after it."""
    return f"{client}/{job.phase}"
