"""The stores of secure aggregation on a client's disk and in memory."""

from pathlib import Path

import pytest

from fedspan.clients.secagg_store import DiskSessionStore, MemorySessionStore, Session, Sum
from fedspan.errors import FedspanError

REVEALED = Sum(clients=("a", "b"), clip=1.0, top=2.0, facts="0" * 64)


def test_a_damaged_record_is_reported(tmp_path: Path) -> None:
    store = DiskSessionStore(tmp_path)
    assert store.load_sum("a", "0" * 64) is None
    store.store_sum("a", "0" * 64, REVEALED)
    assert store.load_sum("a", "0" * 64) == REVEALED
    assert store.load_sum("a", "1" * 64) is None
    assert store.load_sum("b", "0" * 64) is None
    (path,) = tmp_path.rglob("0*.json")
    path.write_text("[]")
    with pytest.raises(FedspanError, match=r"the file is damaged\. Without it, a server may learn"):
        store.load_sum("a", "0" * 64)


def test_a_damaged_session_is_reported_with_the_way_on(tmp_path: Path) -> None:
    """Without it, a server could use the number of an earlier session again."""
    store = DiskSessionStore(tmp_path)
    store.store("a", Session(run="run", number=1, phase="keys", secret=b"secret"))
    (path,) = tmp_path.rglob("session.json")
    path.write_text("[]")
    with pytest.raises(FedspanError, match=r"the number of the last session, .* is unknown\. Start a new run"):
        store.load("a")


def test_a_process_stores_a_session_and_the_last_sum_of_each_client() -> None:
    store = MemorySessionStore()
    session = Session(run="run", number=1, phase="keys", secret=b"secret")
    store.store("a", session)
    assert (store.load("a"), store.load("b")) == (session, None)
    store.store_sum("a", "first", REVEALED)
    assert store.load_sum("a", "first") == REVEALED
    assert store.load_sum("a", "second") is None
    assert store.load_sum("b", "first") is None
    store.store_sum("a", "second", REVEALED)
    assert store.load_sum("a", "first") is None
