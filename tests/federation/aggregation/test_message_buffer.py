"""Messages that wait, decoded in memory and encoded in a file."""

from __future__ import annotations

import pytest
import torch

from fedspan.core.values import Message
from fedspan.federation import serialization
from fedspan.federation.aggregation.message_buffer import MessageBuffer

BODIES = {id: serialization.encode(Message({"x": torch.full((1024,), number)})) for number, id in enumerate("abc")}


def store(held: MessageBuffer, id: str, sent: str) -> Message:
    """Store a client's message and return it."""
    message = serialization.decode(BODIES[sent])
    held.store(id, message, BODIES[sent])
    return message


@pytest.mark.parametrize("in_memory", [1, 14_000, 1 << 20])
def test_messages_beyond_the_budget_are_decoded_again_and_the_last_one_counts(in_memory: int) -> None:
    held = MessageBuffer(in_memory)  # one has 8 KiB of numbers, its structure, and 1 KiB for its tensor
    messages = {id: store(held, id, id) for id in "abc"}
    assert [held.load(id) is messages[id] for id in "abc"] == [
        in_memory > 10_000,
        in_memory > 20_000,
        in_memory > 30_000,
    ]
    store(held, "a", "c")
    for id, sent in zip("abc", "cbc", strict=True):
        assert serialization.encode(held.load(id)) == BODIES[sent]
    with pytest.raises(KeyError):
        held.load("d")


def test_a_message_that_is_discarded_makes_room() -> None:
    held = MessageBuffer(14_000)
    store(held, "a", "a")
    held.discard("a")
    held.discard("b")
    message = store(held, "b", "b")
    assert held.load("b") is message
