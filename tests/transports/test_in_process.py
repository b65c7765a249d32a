"""The simulator's client store: what a round reads and writes for each client."""

from __future__ import annotations

from fedspan.clients.store import ClientState, OverlayMapping
from fedspan.core.values import OptimizerState, ServerState
from fedspan.federation.progress import Progress
from fedspan.transports.in_process import ProgressStore


def test_ids_may_begin_like_others() -> None:
    """Clients "a" and "a/b" have moments of their own, and each sees its own phases only."""
    own, other = (OptimizerState({}, {}), 1), (OptimizerState({}, {}), 2)
    progress = Progress(ServerState(), optimizers={"a/train": own, "a/b/train": other, "ab/train": other})
    store = ProgressStore(progress)
    assert dict(store.load("a", 0).moments) == {"train": own}
    assert dict(store.load("a/b", 0).moments) == {"train": other}
    assert len(store.load("a", 0).moments) == 1


def test_only_accepted_replies_change_what_is_stored() -> None:
    new = (OptimizerState({}, {}), 3)
    store = ProgressStore(Progress(ServerState()))
    for client in ("a", "a/b"):
        moments = OverlayMapping(store.load(client, 0).moments, {"train": new})
        store.store(client, 1, ClientState({}, moments), frozenset())
    memories, optimizers = store.accept(["a/b"])
    assert dict(optimizers) == {"a/b/train": new}
    assert set(memories) == {"a/b"}
