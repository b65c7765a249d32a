"""What a client remembers of its secure sums, on disk and in memory, and which thresholds it accepts."""

from pathlib import Path

import pytest

from fedspan.clients.secagg_store import DiskSessionStore, MemorySessionStore, Session, Sum
from fedspan.errors import FedspanError

pytest.importorskip("cryptography", reason="the extra fedspan[secagg] is not installed")
pytest.importorskip("Crypto", reason="the extra fedspan[secagg] is not installed")

from fedspan.clients.secagg_store import SessionStore
from fedspan.core.values import Message
from fedspan.federation.serialization import encode
from fedspan.federation.settings import SecureSettings
from helpers.secure_game import Game, Play, Story

IDS = tuple(f"honest-{number:02}" for number in range(5))
OTHER_CLIENTS = "has revealed shares in a sum of this model with other clients or other facts"
WITHOUT_FIRST = Story(unknown=IDS[:1])


def make_stores(folder: Path, run: str) -> dict[str, SessionStore]:
    return {id: DiskSessionStore(folder / run / id, folder / "sums" / id) for id in IDS}


def test_a_sum_is_remembered_after_a_restart_and_in_other_runs(tmp_path: Path) -> None:
    first = Game(5, 0, stores=make_stores(tmp_path, "first"))
    first.play(Play())
    second = Game(5, 0, stores=make_stores(tmp_path, "second"))
    second.play(Play(WITHOUT_FIRST, lr=0.2))
    assert not second.list_sums()
    assert len(second.reasons) == 4
    assert all(OTHER_CLIENTS in reason for reason in second.reasons)
    second.play(Play(lr=0.2))
    assert second.list_sums() == [set(IDS)]
    paths = sorted((tmp_path / "sums").rglob("*.json"))
    assert len(paths) == 5
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}


def test_a_client_that_only_signed_may_join_another_sum_but_the_others_do_not() -> None:
    game = Game(5, 0)
    game.play(Play(unasked=IDS[:1]))
    game.play(Play(Story(unknown=IDS[1:2])))
    assert game.list_sums() == [set(IDS)]
    assert len(game.reasons) == 3 + 1
    assert game.reasons[-1].startswith("`message.signatures`: 1 clients have signed")


def test_a_second_exchange_is_a_sum_of_the_clients_of_the_first() -> None:
    """Its message is another one, but the training that it is about is the same."""
    game, second = Game(5, 0), encode(Message({}, {"exchange": 2}))
    game.play(Play(task="second"), body=encode(Message({}, {"exchange": 1})))
    assert all("a second exchange of the round that was trained last" in reason for reason in game.reasons)
    game.reasons.clear()
    game.play(Play())
    game.play(Play(WITHOUT_FIRST, task="second"), body=second)
    assert all(OTHER_CLIENTS in reason for reason in game.reasons)
    assert len(game.reasons) == 4
    game.play(Play(Story(dropped=IDS[:1]), task="second"), body=second)
    assert game.list_sums() == [set(IDS)]
    game.play(Play(task="second"), body=second)
    assert game.list_sums() == [set(IDS), set(IDS)]


@pytest.mark.parametrize(
    ("clients", "colluders", "smallest"),
    [(3, 1, 3), (4, 1, 3), (5, 1, 4), (5, 2, 4), (5, 3, 5), (10, 3, 7), (11, 4, 8)],
)
def test_a_threshold_that_colluders_reach_is_refused(clients: int, colluders: int, smallest: int) -> None:
    """Of n clients, t open the sum: 2 t > n + c, whoever sends another threshold, to all or to some."""
    game = Game(clients, 0, stated=colluders)
    game.play(Play(Story(threshold=smallest - 1)))
    assert len(game.reasons) == clients
    reason = f"`limits.colluders`: {smallest - 1} of {clients} clients can open a sum, which does not withstand"
    assert all(one.startswith(reason) for one in game.reasons)
    game.play(Play(Story(threshold=smallest)))
    assert game.list_sums() == [set(game.honest)]


def test_colluders_that_are_all_the_others_are_refused() -> None:
    game = Game(3, 0, stated=2)
    game.play(Play())
    assert all("a sum of 3 clients is too small. Expected at least 4 clients" in reason for reason in game.reasons)
    assert len(game.reasons) == 3


@pytest.mark.parametrize(("idle", "is_opened"), [(0, True), (1, True), (2, False), (3, False)])
def test_clients_without_weight_hide_nobody(idle: int, is_opened: bool) -> None:
    """Their vectors are zeros: with three of them, the sum of four honest clients would be one client's vector."""
    game = Game(5, 1)
    for id in game.honest[:idle]:
        game.weights[id] = 0.0
    game.play(Play())
    assert bool(game.list_sums()) is is_opened
    assert not game.compute_score()
    assert all("limits.colluders" in reason for reason in game.reasons)


def test_clients_without_weight_are_not_counted_among_those_that_stay() -> None:
    game = Game(10, 1, min_clients=9)
    game.weights[game.honest[0]] = 0.0
    game.play(Play(Story(dropped=game.honest[1:2])))
    assert not game.list_sums()
    assert sum("a sum of 8 clients is too small" in reason for reason in game.reasons) == 8


def test_clients_that_were_sent_other_thresholds_open_nothing() -> None:
    game = Game(5, 0)
    game.play(Play(Story(threshold=4), Story(threshold=5), misled=IDS[:2]))
    assert not game.list_sums()
    assert all("have another agreement than this client" in reason for reason in game.reasons)


@pytest.mark.parametrize("share", [0.51, 2 / 3, 0.8, 1.0])
def test_the_server_s_threshold_withstands_one_colluder(share: float) -> None:
    settings = SecureSettings(threshold=share)
    for clients in range(3, 129):
        threshold = settings.compute_threshold(clients)
        assert clients + 1 < 2 * threshold <= 2 * clients
        assert share * clients - 1e-6 <= threshold
    assert [SecureSettings().compute_threshold(clients) for clients in (3, 4, 5, 6, 9, 10, 11)] == [3, 3, 4, 4, 6, 7, 8]


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
