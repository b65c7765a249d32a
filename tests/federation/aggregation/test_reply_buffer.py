"""Encoded replies that wait, in memory and in a file."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest

from fedspan.errors import FedspanError
from fedspan.federation.aggregation.reply_buffer import ReplyBuffer


@pytest.mark.parametrize("in_memory", [4, 1 << 20], ids=["file", "memory"])
def test_replies_come_back_in_any_order_and_the_last_one_counts(in_memory: int) -> None:
    held = ReplyBuffer(in_memory)
    held.store("a", b"first")
    held.store("b", b"")
    held.store("c", b"third reply")
    assert held.load("c") == b"third reply"
    held.store("a", b"again, and longer")
    assert [held.load(id) for id in "abc"] == [b"again, and longer", b"", b"third reply"]
    with pytest.raises(KeyError):
        held.load("d")
    held.close()
    with pytest.raises(KeyError):
        held.load("a")


def test_replies_beyond_their_budget_on_the_disk_end_the_round_with_a_reason() -> None:
    held = ReplyBuffer(in_memory=8, on_disk=3 << 20)
    held.store("a", bytes(2 << 20))
    with pytest.raises(
        FedspanError, match=r"take 4 MiB, and their budget in .* is 3 MiB. Set the environment variable"
    ):
        held.store("b", bytes(2 << 20))
    with pytest.raises(KeyError):
        held.load("b")
    assert held.load("a") == bytes(2 << 20)
    ReplyBuffer(in_memory=8, on_disk=0).store("a", bytes(8))  # in memory, which the budget is not for


def test_the_budget_leaves_some_of_the_disk_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=(1 << 30) + 9))
    held = ReplyBuffer(in_memory=4)
    held.store("a", bytes(9))
    with pytest.raises(FedspanError, match="budget"):
        held.store("b", bytes(1))
