"""The file format of a checkpoint (``runs.checkpoint``), written and read.

``state.safetensors`` holds the server state. ``clients.json`` holds, for every client, the round of the state that it
holds and of the stored files that it needs (``clients.store``). ``checkpoint.json`` holds the rest, with the SHA-256 of
the other two and of itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, cast

from fedspan.clients.store import MEMORY, MOMENTS, Kind, Stored, Version
from fedspan.core.tensors import Tensors
from fedspan.core.values import OptimizerState, Scalar, ServerState
from fedspan.errors import FedspanError
from fedspan.federation.progress import Progress
from fedspan.federation.serialization import decode_state, encode_state, expect
from fedspan.files import DamagedFileError, from_json, read_whole
from fedspan.runs.folder import RunFolder

__all__ = ["Checkpoint", "DamagedFileError", "load", "pack", "read_index", "read_versions"]

FORMAT = 2
"""Version of checkpoint.json."""

_STATE, _CLIENTS, _INDEX = "state.safetensors", "clients.json", "checkpoint.json"


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run between two rounds.

    Args:
        state: The server state; ``state.round`` names the checkpoint.
        memories: The clients' memories, by client id.
        held: Round of the last server state that reached a client and was accepted, by client id.
        optimizer_states: The clients' optimizer moments, with the state generation that they belong to, by client id.
        best: The best round so far and its score; that round has a checkpoint, this one or an earlier one (so a round
            that becomes the best must be saved).
        positions: Lengths in bytes of the logs at this round, by file name (``metrics.jsonl``, ``ledger.jsonl``), as
            returned by their ``commit``.
        extra: Further values that the round loop must restore.
    """

    state: ServerState
    memories: Mapping[str, Tensors] = field(default_factory=dict)
    held: Mapping[str, int | None] = field(default_factory=dict)
    optimizer_states: Mapping[str, tuple[OptimizerState, int]] = field(default_factory=dict)
    best: tuple[int, float] | None = None
    positions: Mapping[str, int] = field(default_factory=dict)
    extra: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def progress(self) -> Progress:
        """The progress that the round loop resumes from."""
        held = {client: round for client, round in self.held.items() if round is not None}
        return Progress(self.state, self.memories, held, self.optimizer_states)


def _encode_clients(checkpoint: Checkpoint) -> bytes:
    table: dict[str, Mapping[str, int | None]] = {"held": checkpoint.held}
    for kind, values in ((MEMORY, checkpoint.memories), (MOMENTS, checkpoint.optimizer_states)):
        assert isinstance(values, Stored)
        table[kind.name] = values.rounds
    return json.dumps({name: dict(rounds) for name, rounds in table.items()}, separators=(",", ":")).encode()


def _decode_clients(data: bytes, clients: Path) -> tuple[dict[str, int | None], Stored[Any], Stored[Any]]:
    table = from_json(data)
    memories, moments = (
        Stored(kind, clients, expect(table, kind.name, dict)) for kind in cast(tuple[Kind[Any], ...], (MEMORY, MOMENTS))
    )
    return expect(table, "held", dict), memories, moments


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _sealed(index: Mapping[str, Any]) -> bytes:
    """Encode checkpoint.json: the index with the digest of its own text; NaN is written as in Python."""
    digest = _digest(json.dumps(index).encode())
    return (json.dumps({**index, "sha256": digest}, indent=1) + "\n").encode()


def pack(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Encode the files of a checkpoint, by name.

    Args:
        checkpoint: A checkpoint whose clients' files are on the disk (``clients.store``).

    Raises:
        ValueError: If a tensor cannot be stored (``serialization.Writer``).
    """
    files = {_STATE: encode_state(checkpoint.state), _CLIENTS: _encode_clients(checkpoint)}
    index = {
        "format": FORMAT,
        "round": checkpoint.state.round,
        "best": checkpoint.best,
        "positions": dict(checkpoint.positions),
        "extra": dict(checkpoint.extra),
        "files": {name: _digest(data) for name, data in files.items()},
    }
    return {**files, _INDEX: _sealed(index)}


def read_index(folder: Path) -> dict[str, Any]:
    """Read checkpoint.json and check it against its own digest; the tensor files are not read.

    Raises:
        DamagedFileError: If it is missing or differs from what was written.
        FedspanError: If it was written by another version of fedspan.
    """
    path = folder / _INDEX
    data = read_whole(path)
    try:
        index = from_json(data)
        digest = expect(index, "sha256", str)
    except ValueError as error:
        raise DamagedFileError(path, str(error)) from error
    assert isinstance(index, dict)
    body = {name: value for name, value in index.items() if name != "sha256"}
    if _sealed(body) != data:  # the whole text, so that no byte goes unchecked
        raise DamagedFileError(path, f"does not have the SHA-256 {digest}")
    if body.get("format") != FORMAT:
        expected = f"this version of fedspan reads format {FORMAT}"
        raise FedspanError(str(path), f"format {body.get('format')}", expected)
    return body


def load(folder: Path) -> Checkpoint:
    """Read one checkpoint, such as ``run.best``.

    Every byte of the checkpoint is checked, and every clients' file that its own round wrote; an older clients' file is
    checked when it is read.

    Raises:
        DamagedFileError: If a file, which the error names, is missing or differs from what was written.
        FedspanError: If the files were written by another version of fedspan.
    """
    index = read_index(folder)
    data = _contents(folder, index)
    clients = RunFolder(folder.parent if folder.name == "best" else folder.parent.parent).clients
    try:
        state = decode_state(data[_STATE])
        held, memories, optimizer_states = _decode_clients(data[_CLIENTS], clients)
        for name, key, round in memories.versions() | optimizer_states.versions():
            if round == state.round:
                (MEMORY if name == MEMORY.name else MOMENTS).load(clients, key, round)
        best = expect(index, "best", list, NoneType)
    except ValueError as error:  # the files are intact, so another version wrote them
        raise FedspanError(str(folder), str(error), "this version of fedspan cannot read it") from error
    return Checkpoint(
        state=state,
        memories=memories,
        held=held,
        optimizer_states=optimizer_states,
        best=None if best is None else (best[0], best[1]),
        positions=index["positions"],
        extra=index["extra"],
    )


def _contents(folder: Path, index: Mapping[str, Any], only: Collection[str] | None = None) -> dict[str, bytes]:
    data: dict[str, bytes] = {}
    for name, digest in index["files"].items():
        if only is None or name in only:
            data[name] = read_whole(folder / name)
            if _digest(data[name]) != digest:
                raise DamagedFileError(folder / name, f"does not have the SHA-256 {digest}")
    return data


def read_versions(folder: Path) -> set[Version]:
    """List the clients' files that a checkpoint needs.

    Raises:
        FedspanError: If the files are damaged or of another version, as in ``load``; the server state is not read.
    """
    data = _contents(folder, read_index(folder), (_CLIENTS,))
    _, memories, moments = _decode_clients(data[_CLIENTS], folder)
    return memories.versions() | moments.versions()
