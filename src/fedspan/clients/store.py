"""The store of a client's state between rounds, on the data owner's side: its versions, by round."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from fedspan.clients.second_exchange import TRAINED, FirstExchange, FirstExchangeStore
from fedspan.clients.stored_values import Kind, read_moments, write_moments
from fedspan.core.base import BaseUpdate
from fedspan.core.lowrank import LowRank
from fedspan.core.method import Memory
from fedspan.core.noise import compute_tensor_digest
from fedspan.core.values import OptimizerState
from fedspan.errors import FedspanError
from fedspan.federation.serialization import Reader, Writer, expect
from fedspan.files import DamagedFileError, convert_disk_errors, fsync_folder, read_checkpoint_file, write_atomic

__all__ = ["STATE", "ClientState", "ClientStore", "DiskClientStore", "LostStateError", "compute_state_digest"]


@dataclass(frozen=True)
class ClientState:
    """A client's state between rounds.

    Args:
        memory: The method's memory.
        moments: Stored optimizer states by phase, with the generation that they belong to.
        base: The base update that the client holds.
    """

    memory: Memory = field(default_factory=dict)
    moments: Mapping[str, tuple[OptimizerState, int]] = field(default_factory=dict)
    base: BaseUpdate = BaseUpdate()


def compute_state_digest(state: ClientState) -> str:
    """Compute a digest of everything in a client's state that training depends on."""
    tensors = {f"memory {name}": value for name, value in state.memory.items()}
    facts: list[object] = [state.base.round, state.base.rho]
    for phase, (moments, generation) in sorted(state.moments.items()):
        facts.append((phase, generation, sorted(moments.steps.items())))
        for kind, values in moments.moments.items():
            tensors.update({f"moments {phase} {kind} {name}": value for name, value in values.items()})
    for layer, delta in state.base.total.items():
        if isinstance(delta, LowRank):
            facts.append((layer, delta.scale))
            tensors.update({f"base {layer} B": delta.B, f"base {layer} A": delta.A})
        else:
            tensors[f"base {layer}"] = delta
    return hashlib.sha256(f"{facts!r} {compute_tensor_digest(tensors)}".encode()).hexdigest()


class LostStateError(FedspanError):
    """A client's stored state is missing or damaged."""

    def __init__(self, client: str, round: int, reason: str) -> None:
        problem = f"{client} has no state of round {round + 1} ({reason}). The next order sends everything"
        super().__init__("client memory", client, problem=problem)


class ClientStore(FirstExchangeStore, Protocol):
    """The versions of clients' state, and what they trained for a second exchange."""

    def load(self, client: str, round: int) -> ClientState:
        """Load a client's state after its training in a round.

        Raises:
            LostStateError: If the state is missing or damaged.
        """
        ...

    def store(self, client: str, round: int, state: ClientState, needed: frozenset[int]) -> None:
        """Store a version; all others except those of the needed rounds may be deleted.

        Raises:
            FedspanError: If the disk is full or refuses to write.
        """
        ...


def _write_state(writer: Writer, client_state: ClientState) -> Mapping[str, object]:
    moments = {phase: write_moments(writer, state) for phase, state in client_state.moments.items()}
    return {
        "memory": writer.add_tensors(client_state.memory),
        "moments": moments,
        "base": writer.add_base(client_state.base),
    }


def _read_state(reader: Reader, structure: object) -> ClientState:
    moments = expect(structure, "moments", dict)
    return ClientState(
        memory=reader.read_tensors(expect(structure, "memory", dict)),
        moments={phase: read_moments(reader, expect(moments, phase, dict)) for phase in moments},
        base=reader.read_base(expect(structure, "base", dict)),
    )


STATE: Kind[ClientState] = Kind("kept", _write_state, _read_state)


class DiskClientStore:
    """Clients' versions on a disk.

    Args:
        folder: The folder of one run; created when something is stored.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, client: str, round: int) -> ClientState:
        """``ClientStore.load``."""
        try:
            return STATE.load(self._get_path(client), client, round)
        except DamagedFileError as error:
            raise LostStateError(client, round, str(error.value)) from error

    def store(self, client: str, round: int, state: ClientState, needed: frozenset[int]) -> None:
        """``ClientStore.store``."""
        client_path = self._get_path(client)
        target = STATE.get_path(client_path, client, round)
        with convert_disk_errors(self.folder, "free some space; the last accepted round is intact"):
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(target, STATE.encode(client, round, state))
            fsync_folder(target.parent)
            retained_paths = {
                STATE.get_path(client_path, client, retained_round) for retained_round in (round, *needed)
            }
            for path in client_path.glob("round-*/*.safetensors"):
                if path not in retained_paths:
                    path.unlink()
                    path.parent.rmdir()

    def load_trained(self, client: str, round: int) -> FirstExchange:
        """``ClientStore.load_trained``."""
        path = self._get_trained_path(client)
        try:
            return TRAINED.decode(read_checkpoint_file(path), client, round)
        except (DamagedFileError, ValueError) as error:
            reason = str(error.value) if isinstance(error, DamagedFileError) else f"{path.name} {error}"
            raise LostStateError(client, round, f"it trained nothing in it that is stored: {reason}") from error

    def store_trained(self, client: str, round: int, first: FirstExchange | None) -> None:
        """``ClientStore.store_trained``: one file a client, whatever the round."""
        path = self._get_trained_path(client)
        with convert_disk_errors(self.folder, "free some space; the last accepted round is intact"):
            if first is None:
                path.unlink(missing_ok=True)
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, TRAINED.encode(client, round, first))

    def _get_trained_path(self, client: str) -> Path:
        return self._get_path(client) / "trained.safetensors"

    def _get_path(self, client: str) -> Path:
        return self.folder / hashlib.sha256(client.encode()).hexdigest()[:32]
