"""Encoded replies that wait, in memory and in a file."""

from __future__ import annotations

import pytest

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
