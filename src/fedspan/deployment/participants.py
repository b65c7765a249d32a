"""The nodes of a run between its rounds: those that join late, leave, and come back (``federation.late_joiners``).

The clients of a round are the nodes that have joined the run and are online when it begins. They are recorded in the
run's folder before the round's first order is sent, so a resumed run draws the same cohorts and, if the same nodes are
online, repeats an interrupted round with the same clients.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedspan.errors import FedspanError
from fedspan.federation.presence import Presence
from fedspan.federation.progress import ClientData
from fedspan.files import convert_disk_errors, read_bytes, write_atomic

RECORD = "participants.json"
"""The record in a run's folder."""

_POLL = 1.0
"""Seconds between two queries for the nodes that are online, while there are too few."""
_SETTLE = 2.0
"""Seconds for which a round waits for nodes that were invited and have not decided."""
_ADMIT_SECONDS = 3.0
"""Seconds between two queries for new nodes during a round."""
_CURE = "the record of a run's participants is damaged. Restore it from a backup, or start a new run"


class Participant(BaseModel):
    """A node that joined a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    node: Annotated[int, Field(ge=0)]
    examples: Annotated[int, Field(ge=1, lt=2**53)]


class ParticipantRecord(BaseModel):
    """The participants of each round.

    Args:
        present: The clients of each round, from the first one on, sorted.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    clients: dict[str, Participant] = Field(default_factory=dict)
    present: tuple[tuple[str, ...], ...] = ()

    @model_validator(mode="after")
    def _require_known(self) -> Self:
        if unknown := {id for now in self.present for id in now} - self.clients.keys():
            raise ValueError(f"present names no clients: {sorted(unknown)}")
        return self

    def build_presence(self) -> Presence:
        """Return the rounds in which each client was present; one that is present in the last round stays."""
        presence, rounds = Presence({id: () for id in self.clients}), self.present
        for round, now in enumerate(rounds):
            before = set(rounds[round - 1]) if round else set[str]()
            presence = presence.change(round, set(now) - before, before - set(now))
        return presence


def load_record(folder: Path, finished: int = 0) -> ParticipantRecord | None:
    """Load the record of a run's folder; None: the run has finished no round and has none.

    Args:
        finished: Number of finished rounds, all of which the record has to contain.
    """
    path = folder / RECORD
    if not path.is_file():
        if finished:
            problem = f"the run has {finished} finished rounds, and the record of their participants is missing"
            raise FedspanError(str(path), None, problem=f"{problem}. Restore it from a backup, or start a new run")
        return None
    try:
        record = ParticipantRecord.model_validate_json(read_bytes(path))
    except (ValidationError, ValueError, RecursionError) as error:
        raise FedspanError(str(path), None, problem=_CURE) from error
    if len(record.present) < finished:
        raise FedspanError(str(path), len(record.present), f"at least {finished} rounds", problem=_CURE)
    return record


@dataclass(frozen=True)
class NodeCallbacks:
    """How a run finds and invites nodes.

    Args:
        list_online: Returns the ids of the nodes that are online and not revoked.
        invite: Invites nodes that are new or have come back, and returns all nodes whose last introduction was accepted
            in this process, by client id.
        list_undecided: Returns the ids of the invited nodes that have not replied.
        build_clients: Builds the server's view of clients from the numbers of examples that they declared.
        on_change: Called with the ids of all nodes by client id, when a node has joined or an entry has changed.
    """

    list_online: Callable[[], Collection[int]]
    invite: Callable[[], Mapping[str, Participant]]
    list_undecided: Callable[[], Collection[int]]
    build_clients: Callable[[Mapping[str, int]], Mapping[str, ClientData]]
    on_change: Callable[[Mapping[str, int]], None]


class Participants:
    """The nodes of a run.

    Args:
        joined: The nodes whose introduction was accepted in this process, by client id. The record has others, too,
            which are no clients of a round until they are accepted again.
        seconds: Seconds for which a round waits for so many nodes.
    """

    def __init__(
        self, folder: Path, joined: Mapping[str, Participant], callbacks: NodeCallbacks, least: int, seconds: float
    ) -> None:
        self._folder, self._callbacks, self._least, self._seconds = folder, callbacks, least, seconds
        record = load_record(folder) or ParticipantRecord()
        self._record = record.model_copy(update={"clients": {**record.clients, **joined}})
        self.nodes = {id: participant.node for id, participant in self._record.clients.items()}
        """Ids of all nodes that ever joined, by client id; nodes that join are added."""
        self._accepted = frozenset(joined)
        self._awaited = frozenset[int]()
        """Nodes that have not replied and that a round has waited for already."""
        self._admitted_at = float("-inf")

    @property
    def clients(self) -> Mapping[str, Participant]:
        """All nodes that ever joined, by client id."""
        return self._record.clients

    def build_clients(self) -> Mapping[str, ClientData]:
        """Build the server's view of all nodes that ever joined."""
        return self._callbacks.build_clients({id: one.examples for id, one in self._record.clients.items()})

    def build_presence(self) -> Presence:
        """Return the rounds in which each node was present."""
        return self._record.build_presence()

    def admit(self) -> None:
        """Let nodes join that have accepted their invitation; they are present from the next round on."""
        self._admitted_at = time.monotonic()
        accepted = self._callbacks.invite()
        self._accepted = frozenset(accepted)
        changed = {id: one for id, one in accepted.items() if self._record.clients.get(id) != one}
        if changed:
            self._record = self._record.model_copy(update={"clients": {**self._record.clients, **changed}})
            self.nodes.update({id: participant.node for id, participant in changed.items()})
            self._callbacks.on_change(self.nodes)

    def admit_now_and_then(self) -> None:
        """``admit``, at most every few seconds: for callers that wait for something else."""
        if time.monotonic() - self._admitted_at >= _ADMIT_SECONDS:
            self.admit()

    def begin_round(self, round: int) -> tuple[Mapping[str, ClientData], Presence]:
        """Decide and record which nodes are the clients of a round.

        Returns:
            All clients, and the rounds in which each is present.

        Raises:
            FedspanError: If too few nodes are online for too long, or the disk cannot be written.
        """
        present = self._wait(round)
        rounds = (*self._record.present[:round], *[present] * (round + 1 - len(self._record.present[:round])))
        self._record = self._record.model_copy(update={"present": rounds})
        with convert_disk_errors(self._folder):
            write_atomic(self._folder / RECORD, json.dumps(self._record.model_dump(mode="json")).encode())
        return self.build_clients(), self.build_presence()

    def _wait(self, round: int) -> tuple[str, ...]:
        """Wait until enough nodes are online, and return them; those of an interrupted round, if all of them are."""
        recorded = self._record.present[round] if round < len(self._record.present) else ()
        started = time.monotonic()
        while True:
            self.admit()
            online = set(self._callbacks.list_online())
            present = tuple(sorted(id for id in self._accepted if self.nodes[id] in online))
            waited = time.monotonic() - started
            undecided = frozenset(self._callbacks.list_undecided()) & online
            self._awaited &= undecided
            if recorded and set(recorded) <= set(present):
                return recorded
            if waited >= _SETTLE:
                self._awaited |= undecided
            is_settled = undecided <= self._awaited
            if len(present) >= self._least and is_settled and (not recorded or waited >= self._seconds):
                return present
            if waited >= self._seconds and len(present) < self._least:
                problem = f"{len(present)} nodes are online before round {round + 1}: {', '.join(present) or 'none'}"
                expected = f"at least {self._least}. The state before the round is stored: resume when they are back"
                raise FedspanError("nodes", len(present), expected, problem=problem)
            time.sleep(_POLL)
