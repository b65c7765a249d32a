"""Values of clients in files, each with a digest of its own, and those of a run in its folder: memories and moments."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from fedspan.clients.mappings import OverlayMapping
from fedspan.core.tensors import Tensors
from fedspan.core.values import OptimizerState
from fedspan.federation.serialization import Reader, Writer, expect
from fedspan.files import (
    DamagedFileError,
    build_temporary_path,
    convert_disk_errors,
    delete_temporary_files,
    fsync_folder,
    read_checkpoint_file,
    remove,
    write_file,
)

__all__ = [
    "MEMORY",
    "MOMENTS",
    "Kind",
    "StoredMapping",
    "Version",
    "discard",
    "read_moments",
    "store",
    "write_moments",
]

V = TypeVar("V")

Version = tuple[str, str, int]
"""A stored version: the name of its kind, the client, and the round that wrote it."""

NOTHING = -1
"""The value in place of a round if there is no file."""

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
    """Decode the result of ``write_moments``.

    Raises:
        ValueError: If the structure is malformed.
    """
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
        name: Prefix of its file names.
        write: Function that encodes a value as a JSON structure; a writer takes its tensors.
        read: Function that decodes a value from its structure.
    """

    name: str
    write: Callable[[Writer, V], Mapping[str, object]]
    read: Callable[[Reader, object], V]

    def get_path(self, clients: Path, key: str, round: int) -> Path:
        """Return the file of a value; it is named by a digest, since ids may be any text."""
        digest = hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()
        return clients / f"round-{round:05d}" / f"{self.name}-{digest[:32]}.safetensors"

    def encode(self, key: str, round: int, value: V) -> bytes:
        """Encode the file's content.

        Raises:
            ValueError: If a tensor cannot be stored (``serialization.Writer``).
        """
        writer = Writer(canonical=False)
        # The digest comes first: no other 64 zeros precede it.
        structure = {"sha256": _BLANK.decode(), "of": key, "round": round, "value": self.write(writer, value)}
        data = writer.build_payload(self.name, structure)
        return data.replace(_BLANK, hashlib.sha256(data).hexdigest().encode(), 1)

    def load(self, clients: Path, key: str, round: int) -> V:
        """Read a value and check every byte of its file.

        Raises:
            DamagedFileError: If the file is missing or differs from what was written.
        """
        path = self.get_path(clients, key, round)
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
        return self.read(reader, expect(reader.structure, "value", dict))


def _read_memory(reader: Reader, structure: object) -> Tensors:
    return reader.read_tensors(cast(Mapping[str, object], structure))  # which checks every entry


MEMORY: Kind[Tensors] = Kind("memory", lambda writer, memory: writer.add_tensors(memory), _read_memory)
MOMENTS: Kind[tuple[OptimizerState, int]] = Kind("moments", write_moments, read_moments)


class StoredMapping(Mapping[str, V], Generic[V]):
    """Stored values of clients, read from the disk on access.

    Args:
        kind: The kind of the values.
        clients: The folder of all rounds' files.
        rounds: The round that wrote each client's file; ``NOTHING`` for an empty memory, which needs none.
    """

    def __init__(self, kind: Kind[V], clients: Path, rounds: Mapping[str, int]) -> None:
        self.kind = kind
        self.clients = clients
        self.rounds = rounds

    def __getitem__(self, key: str) -> V:
        round = self.rounds[key]
        empty: Any = {}
        return empty if round == NOTHING else self.kind.load(self.clients, key, round)

    def __contains__(self, key: object) -> bool:
        return key in self.rounds

    def __iter__(self) -> Iterator[str]:
        return iter(self.rounds)

    def __len__(self) -> int:
        return len(self.rounds)

    def list_versions(self) -> set[Version]:
        """Return the versions of all files that the values are read from."""
        return {(self.kind.name, key, round) for key, round in self.rounds.items() if round != NOTHING}


def store(
    folder: Path, round: int, memories: Mapping[str, Tensors], optimizers: Mapping[str, tuple[OptimizerState, int]]
) -> tuple[StoredMapping[Tensors], StoredMapping[tuple[OptimizerState, int]]]:
    """Write to disk what a round changed on its clients.

    Args:
        folder: The folder of the clients' files, in a run whose lock this process holds.
        round: Number of the round, which has no checkpoint yet.
        memories: The clients' memories after the round.
        optimizers: Their optimizer states, with the generation that they belong to.

    Returns:
        The same memories and optimizer states, which are read on access.

    Raises:
        FedspanError: If the disk is full or refuses to write; nothing of the round is left then.
        ValueError: If a tensor cannot be stored.
    """
    files: dict[Path, tuple[Kind[Any], str, Any]] = {}

    def collect(kind: Kind[V], values: Mapping[str, V]) -> StoredMapping[V]:
        rounds, changes = _split_changes(values, folder)
        written = {key: round if value or kind is MOMENTS else NOTHING for key, value in changes.items()}
        for key, value in changes.items():
            if written[key] != NOTHING:
                files[kind.get_path(folder, key, round)] = (kind, key, value)
        return StoredMapping(kind, folder, {**rounds, **written})

    stored = collect(MEMORY, memories), collect(MOMENTS, optimizers)
    if files:
        with convert_disk_errors(folder.parent):
            _write(folder / f"round-{round:05d}", files, round)
    return stored


def _split_changes(values: Mapping[str, V], clients: Path) -> tuple[Mapping[str, int], Mapping[str, V]]:
    """Return the values that the folder already holds, by the round of their files, and the others."""
    base, changes = (values.base, values.changes) if isinstance(values, OverlayMapping) else (values, {})
    if isinstance(base, StoredMapping) and base.clients == clients:
        return base.rounds, changes
    return {}, values


def _write(target: Path, files: Mapping[Path, tuple[Kind[Any], str, Any]], round: int) -> None:
    partial = build_temporary_path(target)
    remove(partial)  # left by an earlier process with the same id, as in containers
    try:
        partial.mkdir(parents=True)
        for path, (kind, key, value) in files.items():
            write_file(partial / path.name, kind.encode(key, round, value))
        fsync_folder(partial)
        remove(target)  # left by a round without a checkpoint
        partial.rename(target)
    except BaseException:
        with suppress(OSError):  # give the space back; the first error is the one to report
            remove(partial)
        raise
    fsync_folder(target.parent)


def discard(folder: Path, needed: Iterable[Version], among: Iterable[Version] | None = None) -> None:
    """Delete clients' files that no checkpoint needs.

    Args:
        folder: The folder of the clients' files, in a run whose lock this process holds.
        needed: Versions that the remaining checkpoints name.
        among: Versions that may also exist; None: everything that the folder holds.

    Raises:
        OSError: If the disk refuses to delete.
    """
    kinds: dict[str, Kind[Any]] = {kind.name: kind for kind in (MEMORY, MOMENTS)}
    retained_paths = {kinds[name].get_path(folder, key, round) for name, key, round in needed}
    if among is None:
        delete_temporary_files(folder)
        existing_paths = set(folder.glob("round-*/*"))
    else:
        existing_paths = {kinds[name].get_path(folder, key, round) for name, key, round in among}
    stale = existing_paths - retained_paths
    for path in stale:
        path.unlink(missing_ok=True)
    for round_folder in {path.parent for path in stale} if among is not None else set(folder.glob("round-*")):
        if round_folder.is_dir() and not any(round_folder.iterdir()):
            round_folder.rmdir()
