"""The store of clients' states between rounds, with what they trained for a second exchange: in memory or on a disk."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

from fedspan.clients.mappings import copy_on_write
from fedspan.clients.second_exchange import TRAINED, FirstExchange, FirstExchangeStore
from fedspan.clients.state_files import StateFolder
from fedspan.core.lowrank import LowRank
from fedspan.core.noise import compute_tensor_digest
from fedspan.errors import FedspanError
from fedspan.federation.progress import ClientState
from fedspan.files import DamagedFileError, convert_disk_errors, write_atomic


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
        """Store a version; all others except those of the needed rounds may be deleted."""
        ...


class OverlayClientStore:
    """A client store in memory for one round: states over those before the round, which accepted replies replace.

    It stores no base: the server's process has the base itself, and a state would keep an old one in memory.

    Args:
        states: The clients' states before the round, the accepted version of each; they are not modified.
    """

    def __init__(self, states: Mapping[str, ClientState]) -> None:
        self._states = states
        self.stored: dict[str, ClientState] = {}
        """States that clients stored in this round, whether their replies are accepted or not."""
        self.trained: dict[str, tuple[int, FirstExchange]] = {}
        """What clients trained for a second exchange, with the round."""

    def load(self, client: str, round: int) -> ClientState:
        """``ClientStore.load``; the only version of a client is the accepted one."""
        return self._states.get(client, ClientState())

    def store(self, client: str, round: int, state: ClientState, needed: frozenset[int]) -> None:
        """``ClientStore.store``; the version takes effect when the client's reply is accepted."""
        self.stored[client] = ClientState(state.memory, state.moments)

    def load_trained(self, client: str, round: int) -> FirstExchange:
        trained_round, first = self.trained.get(client, (None, None))
        if first is None or trained_round != round:
            raise LostStateError(client, round, "it did not train in this round")
        return first

    def store_trained(self, client: str, round: int, first: FirstExchange | None) -> None:
        self.trained.pop(client, None)
        if first is not None:
            self.trained[client] = round, first

    def accept(self, clients: Collection[str]) -> Mapping[str, ClientState]:
        """Return the states of all clients, including what the given clients stored in this round."""
        states = copy_on_write(self._states)
        for client in clients:
            states[client] = self.stored[client]
        return states


class DiskClientStore:
    """Clients' versions on a disk, in a folder for each client."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, client: str, round: int) -> ClientState:
        try:
            return self._get_folder(client).load(client, round)
        except DamagedFileError as error:
            raise LostStateError(client, round, str(error.value)) from error

    def store(self, client: str, round: int, state: ClientState, needed: frozenset[int]) -> None:
        """``ClientStore.store``; an empty state has a file, too, so that its loss is noticed."""
        folder = self._get_folder(client)
        with convert_disk_errors(self.folder, "free some space; the last accepted round is intact"):
            folder.store(client, round, state)
            folder.discard({(client, retained) for retained in (round, *needed)})

    def load_trained(self, client: str, round: int) -> FirstExchange:
        path = self._get_trained_path(client)
        try:
            return TRAINED.load(path, client, round)
        except DamagedFileError as error:
            reason = f"it trained nothing in it that is stored: {path.name}: {error.value}"
            raise LostStateError(client, round, reason) from error

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
        return self._get_folder(client).path / "trained.safetensors"

    def _get_folder(self, client: str) -> StateFolder:
        return StateFolder(self.folder / hashlib.sha256(client.encode()).hexdigest()[:32])
