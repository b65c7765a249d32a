"""What a client keeps of its training until the second exchange."""

from __future__ import annotations

import pytest
import torch

from fedspan.clients.second_exchange import FirstExchange
from fedspan.clients.store import LostStateError, OverlayClientStore


def test_what_a_round_trained_is_of_that_round_alone() -> None:
    store = OverlayClientStore({})
    first = FirstExchange({"l/B": torch.ones(3, 2)})
    store.store_trained("a", 2, first)
    assert store.load_trained("a", 2) is first
    for client, round in (("a", 1), ("b", 2)):
        with pytest.raises(LostStateError, match="did not train"):
            store.load_trained(client, round)
    store.store_trained("a", 2, None)
    with pytest.raises(LostStateError, match="did not train"):
        store.load_trained("a", 2)
