"""Files of clients' values, each with a digest of its own, and folders of clients' states by round and client."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from fedspan.clients.mappings import OverlayMapping
from fedspan.core.base import BaseUpdate
from fedspan.core.values import OptimizerState
from fedspan.federation.progress import ClientState
from fedspan.federation.serialization import Reader, Writer, expect
from fedspan.files import (
    DamagedFileError,
    build_temporary_path,
    convert_disk_errors,
    fsync_folder,
    is_temporary,
    read_checkpoint_file,
    remove,
    write_atomic,
    write_file,
)

V = TypeVar("V")

Version = tuple[str, int]
"""A stored version of a client's state: the client, and the round that wrote it."""

_NOTHING = -1
"""The value in place of a round if the state is empty and needs no file."""

_BLANK = b"0" * 64
"""What stands in place of the digest while it is computed."""


def write_moments(writer: Writer, moments_with_generation: tuple[OptimizerState, int]) -> dict[str, object]:
    """Encode an optimizer state and its generation; a writer takes its tensors."""
    state, generation = moments_with_generation
    return {
        "generation": generation,
        "steps": dict(state.steps),
        "moments": {kind: writer.add_tensors(moments) for kind, moments in state.moments.items()},
    }


def read_moments(reader: Reader, structure: object) -> tuple[OptimizerState, int]:
    """Decode the result of ``write_moments``."""
    moments, steps = expect(structure, "moments", dict), expect(structure, "steps", dict)
    state = OptimizerState(
        {kind: reader.read_tensors(expect(moments, kind, dict)) for kind in moments},
        {name: expect(steps, name, int) for name in steps},
    )
    return state, expect(structure, "generation", int)


@dataclass(frozen=True)
class Kind(Generic[V]):
    """A kind of value that clients store.

    Args:
        write: Function that encodes a value as the fields of a JSON object; a writer takes its tensors. The fields
            ``sha256``, ``of`` and ``round`` are the file's own.
        read: Function that decodes a value from an object that has these fields.
    """

    name: str
    write: Callable[[Writer, V], Mapping[str, object]]
    read: Callable[[Reader, object], V]

    def encode(self, key: str, round: int, value: V) -> bytes:
        """Encode the file's content.

        Raises:
            ValueError: If a tensor cannot be stored (``serialization.Writer``).
        """
        writer = Writer(canonical=False)
        # The digest comes first: no other 64 zeros precede it.
        structure = {"sha256": _BLANK.decode(), "of": key, "round": round, **self.write(writer, value)}
        data = writer.build_payload(self.name, structure)
        return data.replace(_BLANK, hashlib.sha256(data).hexdigest().encode(), 1)

    def load(self, path: Path, key: str, round: int) -> V:
        """Read a value and check every byte of its file.

        Raises:
            DamagedFileError: If the file is missing or differs from what was written.
        """
        data = read_checkpoint_file(path)
        try:
            return self.decode(data, key, round)
        except ValueError as error:
            raise DamagedFileError(path, str(error)) from error

    def decode(self, data: bytes, key: str, round: int) -> V:
        """Decode a file's content and check every byte of it.

        Raises:
            ValueError: If it differs from what ``encode`` returned for this key and round.
        """
        reader = Reader(data, self.name)
        digest = expect(reader.structure, "sha256", str)
        blank = data.replace(digest.encode(), _BLANK, 1)
        if hashlib.sha256(blank).hexdigest() != digest:
            raise ValueError(f"does not have the SHA-256 {digest}")
        if (expect(reader.structure, "of", str), expect(reader.structure, "round", int)) != (key, round):
            raise ValueError(f"is of {reader.structure['of']!r} in round {reader.structure['round']}")
        return self.read(reader, reader.structure)


def _write_state(writer: Writer, state: ClientState) -> Mapping[str, object]:
    """Encode the parts of a state that are not empty."""
    parts = {
        "memory": writer.add_tensors(state.memory),
        "moments": {phase: write_moments(writer, moments) for phase, moments in state.moments.items()},
        "base": {} if state.base == BaseUpdate() else writer.add_base(state.base),
    }
    return {name: part for name, part in parts.items() if part}


def _read_state(reader: Reader, structure: object) -> ClientState:
    parts: Mapping[str, Any] = {"memory": {}, "moments": {}, "base": {}, **cast(Mapping[str, Any], structure)}
    moments, base = expect(parts, "moments", dict), expect(parts, "base", dict)
    return ClientState(
        memory=reader.read_tensors(expect(parts, "memory", dict)),
        moments={phase: read_moments(reader, expect(moments, phase, dict)) for phase in moments},
        base=reader.read_base(base) if base else BaseUpdate(),
    )


STATE: Kind[ClientState] = Kind("client", _write_state, _read_state)


class StateFolder:
    """Versions of clients' states on a disk: a folder for each round, with a file for each client.

    A run's folder has one for all clients. A node has one for each client, because processes that share the node's
    folder would otherwise delete the folders of rounds that others are writing to.

    Args:
        path: The folder; created when something is stored.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def get_path(self, client: str, round: int) -> Path:
        """Return the file of a version; it is named by a digest, since ids may be any text."""
        digest = hashlib.sha256(client.encode(errors="surrogatepass")).hexdigest()
        return self._get_round(round) / f"{STATE.name}-{digest[:32]}.safetensors"

    def load(self, client: str, round: int) -> ClientState:
        """Read a version and check every byte of its file.

        Raises:
            DamagedFileError: If the file is missing or differs from what was written.
        """
        return STATE.load(self.get_path(client, round), client, round)

    def store(self, client: str, round: int, state: ClientState) -> None:
        """Write one version, also of an empty state; an earlier one of the same round is replaced in one step.

        Raises:
            OSError: If the disk is full or refuses to write.
        """
        path = self.get_path(client, round)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, STATE.encode(client, round, state))
        fsync_folder(path.parent)

    def store_round(self, round: int, states: Mapping[str, ClientState]) -> StoredStates:
        """Write the states that a round changed: all of them or, if that fails, none.

        Args:
            round: Number of the round, which has no checkpoint yet.
            states: The states of all clients. Changes over states of this folder (``copy_on_write``) are written and
                the others are not read; empty states need no file.

        Returns:
            The same states, which are read on access.
        """
        rounds, changes = self._split_changes(states)
        written = {client: state for client, state in changes.items() if not state.is_empty}
        if written:
            with convert_disk_errors(self.path.parent):
                self._write_round(round, written)
        versions = {client: round if client in written else _NOTHING for client in changes}
        return StoredStates(self, {**rounds, **versions})

    def discard(self, needed: Iterable[Version], among: Iterable[Version] | None = None) -> None:
        """Delete the versions that are not needed, and folders of rounds that become empty.

        Args:
            among: Versions that may also exist; None: everything in the folder.
        """
        retained = {self.get_path(*version) for version in needed}
        if among is None:
            # A temporary file may be one that another process is writing.
            existing = {path for path in self.path.glob("round-*/*") if not is_temporary(path)}
            folders = set(self.path.glob("round-*"))
        else:
            existing = {self.get_path(*version) for version in among}
            folders = {path.parent for path in existing - retained}
        for path in existing - retained:
            path.unlink(missing_ok=True)
        for folder in folders:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def _get_round(self, round: int) -> Path:
        return self.path / f"round-{round:05d}"

    def _split_changes(self, states: Mapping[str, ClientState]) -> tuple[Mapping[str, int], Mapping[str, ClientState]]:
        """Return the states that the folder already holds, by the round of their files, and the others."""
        base, changes = (states.base, states.changes) if isinstance(states, OverlayMapping) else (states, {})
        if isinstance(base, StoredStates) and base.folder.path == self.path:
            return base.rounds, changes
        return {}, states

    def _write_round(self, round: int, states: Mapping[str, ClientState]) -> None:
        target = self._get_round(round)
        partial = build_temporary_path(target)
        remove(partial)  # left by an earlier process with the same id, as in containers
        try:
            partial.mkdir(parents=True)
            for client, state in states.items():
                write_file(partial / self.get_path(client, round).name, STATE.encode(client, round, state))
            fsync_folder(partial)
            remove(target)  # left by a round without a checkpoint
            partial.rename(target)
        except BaseException:
            with suppress(OSError):  # give the space back; the first error is the one to report
                remove(partial)
            raise
        fsync_folder(target.parent)


class StoredStates(Mapping[str, ClientState]):
    """Clients' states in a folder, read from the disk on access.

    Args:
        rounds: The round that wrote each client's file; -1 for an empty state without a file.
    """

    def __init__(self, folder: StateFolder, rounds: Mapping[str, int]) -> None:
        self.folder = folder
        self.rounds = rounds

    def __getitem__(self, client: str) -> ClientState:
        round = self.rounds[client]
        return ClientState() if round == _NOTHING else self.folder.load(client, round)

    def __contains__(self, client: object) -> bool:
        return client in self.rounds

    def __iter__(self) -> Iterator[str]:
        return iter(self.rounds)

    def __len__(self) -> int:
        return len(self.rounds)

    def list_versions(self) -> set[Version]:
        """Return the versions of all files that the states are read from."""
        return {(client, round) for client, round in self.rounds.items() if round != _NOTHING}
