"""The last order of a run on a node's disk: what is carried out, answered again or refused, across restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedspan.deployment.last_order import LastOrder, LastOrderFile, load_last_order
from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope

ORDER, REPLY = Envelope("order", b"weights"), Envelope("reply é", b"new\nweights")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "serial"


def test_an_order_is_carried_out_once_and_its_reply_given_again_after_a_restart(path: Path) -> None:
    first = LastOrderFile(path)
    assert first.begin(ORDER, 5) is None
    first.close(REPLY, "context")
    again = LastOrderFile(path)
    assert again.begin(ORDER, 5) == REPLY
    again.require_context("context")
    with pytest.raises(FedspanError, match="order 5 was answered with other data or another node file"):
        again.require_context("another")


@pytest.mark.parametrize(
    ("order", "serial"),
    [(ORDER, 4), (Envelope("order", b"other weights"), 5), (Envelope("orderw", b"eights"), 5)],
)
def test_older_orders_and_others_with_the_same_serial_are_refused(path: Path, order: Envelope, serial: int) -> None:
    """Also one whose bytes are the same, of another header."""
    LastOrderFile(path).begin(ORDER, 5)
    with pytest.raises(FedspanError, match=f"order {serial} arrived before, or is older than order 5"):
        LastOrderFile(path).begin(order, serial)
    assert LastOrderFile(path).begin(order, 6) is None


def test_an_answered_order_without_its_reply_is_not_carried_out_again(path: Path) -> None:
    order = LastOrderFile(path)
    order.begin(ORDER, 5)
    order.close()
    with pytest.raises(FedspanError, match="order 5 arrived before"):
        LastOrderFile(path).begin(ORDER, 5)


@pytest.mark.parametrize("damage", [b"", b"reply \xff\n", b"reply\nother weights"])
def test_a_damaged_reply_is_none(path: Path, damage: bytes) -> None:
    order = LastOrderFile(path)
    order.begin(ORDER, 5)
    order.close(REPLY)
    path.with_name("serial-reply").write_bytes(damage)
    with pytest.raises(FedspanError, match="order 5 arrived before"):
        LastOrderFile(path).begin(ORDER, 5)


def test_the_next_order_removes_the_reply_to_the_last_one(path: Path) -> None:
    order = LastOrderFile(path)
    order.begin(ORDER, 5)
    order.close(REPLY)
    assert path.with_name("serial-reply").stat().st_mode & 0o777 == 0o600
    LastOrderFile(path).begin(Envelope("next"), 6)
    assert not path.with_name("serial-reply").exists()


def test_an_interrupted_order_is_started_again_but_not_for_ever(path: Path) -> None:
    for number in range(16):
        order = LastOrderFile(path)
        assert order.begin(ORDER, 5) is None
        assert order.is_recorded is (number > 0)
        order.mark_recorded()
    with pytest.raises(FedspanError, match="order 5 was interrupted 16 times"):
        LastOrderFile(path).begin(ORDER, 5)
    assert load_last_order(path).starts == 16
    assert LastOrderFile(path).begin(ORDER, 6) is None


def test_a_run_in_which_the_node_does_not_participate_leaves_nothing(tmp_path: Path) -> None:
    order = LastOrderFile(tmp_path / "missing" / "serial")
    assert order.begin(ORDER, 5) is None
    order.close(REPLY)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"serial": -1}', b'{"serial": 1, "more": 2}', b"\xff"])
def test_a_damaged_file_is_named_with_the_remedy(path: Path, content: bytes) -> None:
    assert load_last_order(path) == LastOrder()
    path.write_bytes(content)
    with pytest.raises(FedspanError, match="the file is damaged. Remove its folder".replace(".", r"\.")) as caught:
        load_last_order(path)
    assert caught.value.field == str(path)
