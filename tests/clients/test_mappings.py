"""Values of clients over those that are stored."""

from __future__ import annotations

from fedspan.clients.mappings import OverlayMapping
from fedspan.clients.store import ClientState
from fedspan.core.values import OptimizerState, ServerState
from fedspan.federation.progress import Progress
from fedspan.transports.in_process import ProgressStore


def test_only_accepted_replies_change_what_is_stored() -> None:
    new = (OptimizerState({}, {}), 3)
    store = ProgressStore(Progress(ServerState()))
    for client in ("a", "a/b"):
        moments = OverlayMapping(store.load(client, 0).moments, {"train": new})
        store.store(client, 1, ClientState({}, moments), frozenset())
    memories, optimizers = store.accept(["a/b"])
    assert dict(optimizers) == {"a/b/train": new}
    assert set(memories) == {"a/b"}
