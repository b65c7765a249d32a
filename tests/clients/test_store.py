"""A client's own store on disk: what it trained for a second exchange, beside the versions of its state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedspan.clients.second_exchange import FirstExchange
from fedspan.clients.store import ClientState, DiskClientStore, LostStateError


def memory(value: float) -> dict[str, torch.Tensor]:
    return {"l/B": torch.full((3, 2), value)}


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
