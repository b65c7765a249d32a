"""The client store, in memory for a round and on disk: versions of states, and what a second exchange needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedspan.clients.second_exchange import FirstExchange
from fedspan.clients.store import DiskClientStore, LostStateError, OverlayClientStore
from fedspan.core.base import BaseUpdate, Increment
from fedspan.core.values import OptimizerState
from fedspan.federation.progress import ClientState


def memory(value: float) -> dict[str, torch.Tensor]:
    return {"l/B": torch.full((3, 2), value)}


def test_only_accepted_replies_change_what_is_stored() -> None:
    """Clients' ids may begin like others, and all phases of a state stay, also those without a job in the round."""
    old, new = (OptimizerState({}, {}), 2), (OptimizerState({}, {}), 3)
    before = {"a": ClientState(memory(1)), "a/b": ClientState(memory(2), {"probe": old, "train": old})}
    store, base = OverlayClientStore(before), BaseUpdate().add(Increment(0, {"l": torch.ones(2, 2)}))
    for client in ("a", "a/b", "c"):
        own = store.load(client, 0)
        store.store(client, 1, ClientState(own.memory, {**own.moments, "train": new}, base), frozenset())
        assert store.load(client, 0) is own or client == "c"  # until the reply is accepted
    states = store.accept(["a/b", "c"])
    assert set(states) == {"a", "a/b", "c"}
    assert states["a"] is before["a"]
    assert states["a/b"].moments == {"probe": old, "train": new}
    assert states["a/b"].memory is before["a/b"].memory
    assert states["c"] == ClientState({}, {"train": new})  # without the base, which the server's process has
    assert before["a/b"].moments["train"] is old


def test_an_empty_state_that_is_lost_is_noticed(tmp_path: Path) -> None:
    clients = DiskClientStore(tmp_path)
    clients.store("a", 0, ClientState(), frozenset())
    assert clients.load("a", 0) == ClientState()
    next(tmp_path.rglob("*.safetensors")).unlink()
    with pytest.raises(LostStateError, match="a has no state of round 1"):
        clients.load("a", 0)


def test_what_a_round_trained_is_one_file_of_a_client_whatever_versions_stay(tmp_path: Path) -> None:
    clients = DiskClientStore(tmp_path)
    for round in (3, 4):
        clients.store("a", round, ClientState(memory(round)), frozenset({3}))
        clients.store_trained("a", round, FirstExchange(memory(round), 0.5))
    clients.store_trained("b", 4, FirstExchange(memory(9), 1.0, "digest"))
    assert torch.equal(clients.load("a", 3).memory["l/B"], memory(3)["l/B"])
    first = clients.load_trained("a", 4)
    assert (first.factor, first.order) == (0.5, "")
    assert torch.equal(first.tensors["l/B"], memory(4)["l/B"])
    with pytest.raises(LostStateError, match=r"a has no state of round 4 .*of 'a' in round 4"):
        clients.load_trained("a", 3)
    clients.store_trained("a", 4, None)
    clients.store_trained("a", 4, None)  # it need not exist
    with pytest.raises(LostStateError, match="a has no state of round 5"):
        clients.load_trained("a", 4)
    assert clients.load_trained("b", 4).order == "digest"
    path = next(tmp_path.glob("*/trained.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(LostStateError, match="SHA-256"):
        clients.load_trained("b", 4)
