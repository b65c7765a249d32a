"""The files of a checkpoint: their encoding, and reading them with every byte checked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedspan.clients.state_files import StateFolder, StoredStates, Version
from fedspan.core.values import Scalar, ServerState
from fedspan.errors import FedspanError
from fedspan.federation.progress import ClientState, OpenOrder, OpenOrders, Progress
from fedspan.federation.serialization import decode_state, encode_state, expect
from fedspan.files import (
    DamagedFileError,
    from_json,
    read_checkpoint_file,
)
from fedspan.logs import Position
from fedspan.run_folder import RunFolder
from fedspan.runs.selection import Selection

FORMAT = 7


_STATE, _CLIENTS, _ORDERS, _INDEX = "state.safetensors", "clients.json", "orders.json", "checkpoint.json"


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run between two rounds.

    Args:
        state: The server state; ``state.round`` names the checkpoint.
        last_rounds: Round of the last server state that reached a client and was accepted, by client id.
        selection: The selection after this round; its best round has a checkpoint, this one or an earlier one (so a
            round that becomes the best must be saved).
        positions: Ends of the logs at this round, by file name (``metrics.jsonl``, ``ledger.jsonl``), as returned by
            their ``commit``.
        inputs: SHA-256 of the run's files that no round changes, by name (``integrity.compute_input_digests``).
        last_replies: Round of the last accepted reply of each client that lost what it stored since then, by client id.
    """

    state: ServerState
    states: Mapping[str, ClientState] = field(default_factory=dict)
    last_rounds: Mapping[str, int | None] = field(default_factory=dict)
    selection: Selection = field(default_factory=Selection)
    positions: Mapping[str, Position] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Scalar] = field(default_factory=dict)
    last_replies: Mapping[str, int] = field(default_factory=dict)
    open: OpenOrders = field(default_factory=OpenOrders)

    @property
    def progress(self) -> Progress:
        """The progress that the round loop resumes from."""
        last_rounds = {client: round for client, round in self.last_rounds.items() if round is not None}
        return Progress(self.state, self.states, last_rounds, self.last_replies, self.open)


def _encode_clients(checkpoint: Checkpoint) -> bytes:
    assert isinstance(checkpoint.states, StoredStates)
    table: dict[str, Mapping[str, int | None]] = {
        "last_rounds": checkpoint.last_rounds,
        "last_replies": checkpoint.last_replies,
        "states": checkpoint.states.rounds,
    }
    return json.dumps({name: dict(rounds) for name, rounds in table.items()}, separators=(",", ":")).encode()


def _decode_clients(data: bytes, clients: Path) -> tuple[dict[str, int | None], dict[str, int], StoredStates]:
    table = from_json(data)
    states = StoredStates(StateFolder(clients), expect(table, "states", dict))
    return expect(table, "last_rounds", dict), expect(table, "last_replies", dict), states


def _encode_open(open: OpenOrders) -> dict[str, bytes]:
    """Encode the orders of asynchronous rounds and the states that belong to them; nothing for synchronous rounds."""
    if open == OpenOrders():
        return {}
    facts = {"orders": [asdict(order) for order in open.orders], "number": open.number, "clock": open.clock}
    states = {_get_state_name(round): encode_state(state) for round, state in open.states.items()}
    return {_ORDERS: json.dumps({**facts, "states": list(open.states)}, separators=(",", ":")).encode(), **states}


def _decode_open(data: Mapping[str, bytes]) -> OpenOrders:
    if _ORDERS not in data:
        return OpenOrders()
    table = from_json(data[_ORDERS])
    return OpenOrders(
        orders=tuple(OpenOrder(**order) for order in expect(table, "orders", list)),
        number=expect(table, "number", int),
        clock=expect(table, "clock", float),
        states={round: decode_state(data[_get_state_name(round)]) for round in expect(table, "states", list)},
    )


def _get_state_name(round: int) -> str:
    return f"state-{round:05d}.safetensors"


def _compute_digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _seal_index(index: Mapping[str, Any]) -> bytes:
    """Encode checkpoint.json: the index with the digest of its own text; NaN is written as in Python."""
    digest = _compute_digest(json.dumps(index).encode())
    return (json.dumps({**index, "sha256": digest}, indent=1) + "\n").encode()


def pack(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Encode the files of a checkpoint, by name.

    Raises:
        ValueError: If a tensor cannot be stored (``serialization.Writer``).
    """
    files = {
        _STATE: encode_state(checkpoint.state),
        _CLIENTS: _encode_clients(checkpoint),
        **_encode_open(checkpoint.open),
    }
    index = {
        "format": FORMAT,
        "round": checkpoint.state.round,
        "selection": checkpoint.selection.to_json(),
        "positions": {name: list(position) for name, position in checkpoint.positions.items()},
        "inputs": dict(checkpoint.inputs),
        "extra": dict(checkpoint.extra),
        "files": {name: _compute_digest(data) for name, data in files.items()},
    }
    return {**files, _INDEX: _seal_index(index)}


def read_index(folder: Path) -> dict[str, Any]:
    """Read checkpoint.json and check it against its own digest; the tensor files are not read.

    Raises:
        DamagedFileError: If it is missing or differs from what was written.
        FedspanError: If it was written by another version of fedspan.
    """
    path = folder / _INDEX
    data = read_checkpoint_file(path)
    try:
        index = from_json(data)
        digest = expect(index, "sha256", str)
    except ValueError as error:
        raise DamagedFileError(path, str(error)) from error
    assert isinstance(index, dict)
    body = {name: value for name, value in index.items() if name != "sha256"}
    if _seal_index(body) != data:  # the whole text, so that no byte goes unchecked
        raise DamagedFileError(path, f"does not have the SHA-256 {digest}")
    if body.get("format") != FORMAT:
        problem = f"the checkpoint has format {body.get('format')}, and this version of fedspan reads format {FORMAT}"
        raise FedspanError(str(path), body.get("format"), problem=problem)
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
    data = _parse_contents(folder, index)
    clients = RunFolder(folder.parent if folder.name == "best" else folder.parent.parent).clients
    try:
        state = decode_state(data[_STATE])
        last_rounds, last_replies, states = _decode_clients(data[_CLIENTS], clients)
        for client, round in states.list_versions():
            if round == state.round:
                states.folder.load(client, round)
        selection = Selection.from_json(expect(index, "selection", dict))
        open = _decode_open(data)
    except ValueError as error:  # the files are intact, so another version wrote them
        raise FedspanError(
            str(folder), str(error), problem=f"this version of fedspan cannot read the checkpoint ({error})"
        ) from error
    return Checkpoint(
        state=state,
        states=states,
        last_rounds=last_rounds,
        selection=selection,
        positions=read_positions(index),
        inputs=index["inputs"],
        extra=index["extra"],
        last_replies=last_replies,
        open=open,
    )


def read_positions(index: Mapping[str, Any]) -> dict[str, Position]:
    """Return the ends of the logs that an index of ``read_index`` names, by file name."""
    return {name: Position(*position) for name, position in index["positions"].items()}


def _parse_contents(folder: Path, index: Mapping[str, Any], only: Collection[str] | None = None) -> dict[str, bytes]:
    data: dict[str, bytes] = {}
    for name, digest in index["files"].items():
        if only is None or name in only:
            data[name] = read_checkpoint_file(folder / name)
            if _compute_digest(data[name]) != digest:
                raise DamagedFileError(folder / name, f"does not have the SHA-256 {digest}")
    return data


def read_versions(folder: Path) -> set[Version]:
    """List the versions of clients' states that a checkpoint needs.

    Raises:
        FedspanError: If the files are damaged or of another version, as in ``load``; the server state is not read.
    """
    data = _parse_contents(folder, read_index(folder), (_CLIENTS,))
    *_, states = _decode_clients(data[_CLIENTS], folder)
    return states.list_versions()
