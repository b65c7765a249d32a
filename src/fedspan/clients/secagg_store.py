"""Store of a client of secure aggregation: its session between the phases, and the sums that it helped to open."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Literal, Protocol

from pydantic import Field, ValidationError

from fedspan.errors import FedspanError
from fedspan.federation.protocol import ClientFacts, Count, HeaderPart, Name
from fedspan.federation.secagg.messages import (
    Agreement,
    BinaryPart,
    PublicKeys,
    build_session_context,
    compute_facts_digest,
)
from fedspan.files import convert_disk_errors, read_bytes, write_atomic


class Session(BinaryPart):
    """A client's state between the phases of a session.

    Args:
        phase: The last phase that was answered.
        secret: The secret that the keys are derived from; empty once the session has ended.
        peers: Keys of all clients, as received in the phase of shares.
        facts: The facts about the clients that are part of it.
        present: The clients with which the vector was masked.
        survivors: The clients whose vectors are in the sum, as signed.
        sealed: What the clients sealed for this one, as received in the phase of confirmation, if it opens.
        trained: Round and model (``Agreement.model``) of the last vector that was masked outside a second exchange.
            A second exchange is of it, because what was trained before is deleted.
    """

    run: str
    number: Count
    phase: Literal["keys", "shares", "masked", "confirmed", "unmasked"]
    secret: bytes
    peers: dict[Name, PublicKeys] = Field(default_factory=dict)
    agreement: Agreement | None = None
    facts: tuple[ClientFacts, ...] = ()
    present: tuple[Name, ...] = ()
    survivors: tuple[Name, ...] = ()
    sealed: dict[Name, bytes] = Field(default_factory=dict)
    trained: tuple[Count, str] | None = None

    def get_agreement(self) -> Agreement:
        """Return the client's agreement, which is stored since the phase of shares."""
        assert self.agreement is not None
        return self.agreement

    def build_transcript(self) -> str:
        """Return what all clients of the sum agree on (``Agreement.build_transcript``)."""
        return self.get_agreement().build_transcript(build_session_context(self.run, self.number), self.peers)

    def get_model(self) -> str:
        """Return the model whose training is summed, which is stored since the phase of masks."""
        assert self.trained is not None
        return self.trained[1]

    def build_sum(self, survivors: Collection[str]) -> Sum:
        """Return what the sum of these clients has in common with the other sums of its model."""
        agreement = self.get_agreement()
        facts = compute_facts_digest(one for one in self.facts if one.id in survivors)
        return Sum(clients=tuple(sorted(survivors)), clip=agreement.clip, top=agreement.top, facts=facts)


class Sum(HeaderPart):
    """What all sums of a model have in common in which a client reveals shares.

    Args:
        clients: The clients whose vectors are in the sum, sorted.
        clip: Largest norm of a change (``Agreement.clip``).
        top: Largest weight that counts (``Agreement.top``).
        facts: Digest of the facts about these clients, such as their weights (``compute_facts_digest``).
    """

    clients: tuple[Name, ...]
    clip: float
    top: float
    facts: str


class SessionStore(Protocol):
    """Store of the clients' sessions, and of the sums in which they revealed shares."""

    def load(self, client: str) -> Session | None:
        """Load a client's last session."""
        ...

    def store(self, client: str, session: Session) -> None:
        """Replace the last session by a new one, which is durable on return."""
        ...

    def load_sum(self, client: str, model: str) -> Sum | None:
        """Load the sum of a model in which a client revealed shares; None: there is none."""
        ...

    def store_sum(self, client: str, model: str, revealed: Sum) -> None:
        """Store the sum of a model, which is durable on return."""
        ...


class MemorySessionStore:
    """Sessions in this process, with each client's last sum: a run does not return to an earlier model."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._sums: dict[str, tuple[str, Sum]] = {}

    def load(self, client: str) -> Session | None:
        return self._sessions.get(client)

    def store(self, client: str, session: Session) -> None:
        self._sessions[client] = session

    def load_sum(self, client: str, model: str) -> Sum | None:
        last, revealed = self._sums.get(client, ("", None))
        return revealed if last == model else None

    def store_sum(self, client: str, model: str, revealed: Sum) -> None:
        self._sums[client] = model, revealed


class DiskSessionStore:
    """Sessions on a disk, readable by their owner only.

    A client's session is one file next to its stored state, ``<folder>/<digest of the client's id>/session.json``,
    which is replaced as a whole. The sum of a model in which it revealed shares is one file a model.

    Args:
        folder: The folder of one run, as in ``DiskClientStore``; created when something is stored.
        sums: The folder of the sums of all runs of one client; None: next to the session.
    """

    def __init__(self, folder: Path, sums: Path | None = None) -> None:
        self.folder, self._sums = folder, sums

    def load(self, client: str) -> Session | None:
        """``SessionStore.load``.

        Raises:
            FedspanError: If the file is damaged, so that the phases answered so far are unknown.
        """
        path = self._get_folder(client) / "session.json"
        if not path.is_file():
            return None
        try:
            return Session.model_validate_json(read_bytes(path))
        except ValidationError as error:
            problem = (
                "the file is damaged, so the number of the last session, which no other one may have, is unknown. "
                "Start a new run"
            )
            raise FedspanError(str(path), None, problem=problem) from error

    def store(self, client: str, session: Session) -> None:
        self._write(self._get_folder(client) / "session.json", session.model_dump_json())

    def load_sum(self, client: str, model: str) -> Sum | None:
        path = self._get_sum_path(client, model)
        if not path.is_file():
            return None
        try:
            return Sum.model_validate_json(read_bytes(path))
        except ValidationError as error:
            problem = "the file is damaged. Without it, a server may learn this client's update of one model"
            raise FedspanError(str(path), None, problem=problem) from error

    def store_sum(self, client: str, model: str, revealed: Sum) -> None:
        self._write(self._get_sum_path(client, model), revealed.model_dump_json())

    def _write(self, path: Path, text: str) -> None:
        with convert_disk_errors(self.folder, "free some space; the round can be run again"):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomic(path, text.encode(), 0o600)

    def _get_folder(self, client: str) -> Path:
        return self.folder / hashlib.sha256(client.encode()).hexdigest()[:32]

    def _get_sum_path(self, client: str, model: str) -> Path:
        return (self._sums or self._get_folder(client) / "sums") / f"{model}.json"


def remove_secrets(folder: Path, latest: float) -> None:
    """Remove what sessions need to continue from their files; what later sessions must differ from stays.

    Args:
        latest: Sessions without a phase since this time, in seconds since the epoch, do not continue.
    """
    for path in folder.glob("*/*/session.json"):
        with suppress(OSError, ValidationError):  # tried again with the next run, or reported by ``load``
            if path.stat().st_mtime < latest and (session := Session.model_validate_json(path.read_bytes())).secret:
                ended = Session(
                    run=session.run, number=session.number, phase="unmasked", secret=b"", trained=session.trained
                )
                write_atomic(path, ended.model_dump_json().encode(), 0o600)
