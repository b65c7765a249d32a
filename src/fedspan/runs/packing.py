"""One checkpoint as files, and back: the format under ``runs.checkpoint``.

``state.safetensors`` holds the server state, ``clients.safetensors`` memories and kept optimizer states, and
``checkpoint.json`` the rest, with the SHA-256 of the two others and of itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

from fedspan.core.tensors import Tensors
from fedspan.core.values import OptimizerState, Scalar, ServerState
from fedspan.engines.federation import Progress
from fedspan.engines.wire import Reader, Writer, decode_state, encode_state, expect
from fedspan.errors import FedspanError
from fedspan.runs.files import from_json

__all__ = ["FILES", "Checkpoint", "Damaged", "load", "pack", "read_index"]

FORMAT = 1
"""Version of checkpoint.json; a reader refuses any other."""

_STATE, _CLIENTS, _INDEX = "state.safetensors", "clients.safetensors", "checkpoint.json"
FILES = (_STATE, _CLIENTS, _INDEX)


@dataclass(frozen=True)
class Checkpoint:
    """What a run is between two rounds.

    Args:
        state: the server's; ``state.round`` names the checkpoint.
        memories: what clients keep, by client id.
        held: round of the last server state that reached a client and was accepted, by client id.
        optimizer_states: moments that clients keep, with the state generation that they belong to, by client id.
        best: the best round so far and its score; that round has a checkpoint, this one or an earlier one (so a round
            that becomes the best is one to save).
        positions: lengths in bytes of the logs at this round, by file name (``metrics.jsonl``, ``ledger.jsonl``), as
            their ``commit`` returned them.
        extra: whatever else the round loop must remember.
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
        """What the round loop goes on from."""
        held = {client: round for client, round in self.held.items() if round is not None}
        return Progress(self.state, self.memories, held, self.optimizer_states)


def _encode_clients(checkpoint: Checkpoint) -> bytes:
    writer = Writer(canonical=False)
    structure = {
        "memories": {client: writer.tensors(memory) for client, memory in checkpoint.memories.items()},
        "optimizers": {
            client: {
                "generation": generation,
                "steps": dict(state.steps),
                "moments": {kind: writer.tensors(moments) for kind, moments in state.moments.items()},
            }
            for client, (state, generation) in checkpoint.optimizer_states.items()
        },
    }
    return writer.payload("clients", structure)


def _decode_clients(data: bytes) -> tuple[dict[str, Tensors], dict[str, tuple[OptimizerState, int]]]:
    reader = Reader(data, "clients")
    memories = expect(reader.structure, "memories", dict)
    optimizers = expect(reader.structure, "optimizers", dict)

    def optimizer(kept: object) -> tuple[OptimizerState, int]:
        moments, steps = expect(kept, "moments", dict), expect(kept, "steps", dict)
        state = OptimizerState(
            {kind: reader.tensors(expect(moments, kind, dict)) for kind in moments},
            {name: expect(steps, name, int) for name in steps},
        )
        return state, expect(kept, "generation", int)

    return (
        {client: reader.tensors(expect(memories, client, dict)) for client in memories},
        {client: optimizer(kept) for client, kept in optimizers.items()},
    )


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _sealed(index: Mapping[str, Any]) -> bytes:
    """The bytes of checkpoint.json: the index with the digest of its own text. A NaN stands in it as Python has it."""
    digest = _digest(json.dumps(index).encode())
    return (json.dumps({**index, "sha256": digest}, indent=1) + "\n").encode()


def pack(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The files of a checkpoint, by name.

    Raises:
        ValueError: if a tensor cannot be stored (``wire.Writer``).
    """
    files = {_STATE: encode_state(checkpoint.state), _CLIENTS: _encode_clients(checkpoint)}
    index = {
        "format": FORMAT,
        "round": checkpoint.state.round,
        "best": checkpoint.best,
        "positions": dict(checkpoint.positions),
        "held": dict(checkpoint.held),
        "extra": dict(checkpoint.extra),
        "files": {name: _digest(data) for name, data in files.items()},
    }
    return {**files, _INDEX: _sealed(index)}


class Damaged(FedspanError):
    """A checkpoint is not what was written; an older one may be. Not raised for another version's."""

    def __init__(self, path: Path, how: str) -> None:
        super().__init__(str(path), how, "the checkpoint is damaged; use another one")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except PermissionError as error:
        raise FedspanError(str(path), "no permission", "make it readable for this user") from error
    except OSError as error:
        raise Damaged(path, error.strerror or str(error)) from error


def read_index(folder: Path) -> dict[str, Any]:
    """What checkpoint.json says, checked against its own digest; the tensors' files are not looked at.

    Raises:
        Damaged: if it is missing or not as written.
        FedspanError: if it is of another version of fedspan.
    """
    path = folder / _INDEX
    data = _read(path)
    try:
        index = from_json(data)
        digest = expect(index, "sha256", str)
    except ValueError as error:
        raise Damaged(path, str(error)) from error
    assert isinstance(index, dict)
    body = {name: value for name, value in index.items() if name != "sha256"}
    if _sealed(body) != data:  # the whole text, so that no byte goes unchecked
        raise Damaged(path, f"does not have the SHA-256 {digest}")
    if body.get("format") != FORMAT:
        raise FedspanError(str(path), f"format {body.get('format')}", f"this version of fedspan reads format {FORMAT}")
    return body


def load(folder: Path) -> Checkpoint:
    """Read one checkpoint, such as ``run.best``, and check every byte of it.

    Raises:
        Damaged: naming the file, if one is missing or not as written.
        FedspanError: if they are of another version of fedspan.
    """
    index = read_index(folder)
    data: dict[str, bytes] = {}
    for name, digest in index["files"].items():
        data[name] = _read(folder / name)
        if _digest(data[name]) != digest:
            raise Damaged(folder / name, f"does not have the SHA-256 {digest}")
    try:
        state = decode_state(data[_STATE])
        memories, optimizer_states = _decode_clients(data[_CLIENTS])
        best = expect(index, "best", list, NoneType)
    except ValueError as error:  # whole, so written by another version
        raise FedspanError(str(folder), str(error), "this version of fedspan cannot read it") from error
    return Checkpoint(
        state=state,
        memories=memories,
        held=index["held"],
        optimizer_states=optimizer_states,
        best=None if best is None else (best[0], best[1]),
        positions=index["positions"],
        extra=index["extra"],
    )
