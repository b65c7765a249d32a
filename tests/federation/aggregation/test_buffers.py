"""Replies that wait for the others, and the size that a reply may have."""

import shutil
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from fedspan.core.values import Client, LayerSpec, Message, Spec
from fedspan.errors import FedspanError
from fedspan.federation import serialization
from fedspan.federation.aggregation.plaintext import PlaintextAggregation
from fedspan.federation.aggregation.reduction import MessageBuffer, ReplyBuffer
from fedspan.federation.federation import STRICT
from fedspan.federation.progress import ClientData
from fedspan.federation.round_context import RoundContext, Tally
from fedspan.federation.settings import RoundSettings
from fedspan.methods.lora_a2 import LoRAA2
from fedspan.training.jobs import TrainingSettings

BODIES = {id: serialization.encode(Message({"x": torch.full((1024,), number)})) for number, id in enumerate("abc")}


def store(held: MessageBuffer, id: str, sent: str) -> Message:
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


RANK, NONE = 8, np.array([], dtype=np.int64)


@pytest.mark.parametrize("round", [0, 1])
def test_a_reply_whose_size_depends_on_data_is_within_its_limit(round: int) -> None:
    narrow, wide = LayerSpec("narrow", 4, 3), LayerSpec("wide", 700, 900)
    method = LoRAA2(spec=Spec(layers=(narrow, wide)), seed=1, r=RANK, lora_alpha=RANK)
    client = Client("a", rank=4, scaling=1.0, examples=5, weight=5.0)
    context = RoundContext(
        method=method,
        settings=RoundSettings(rounds=2),
        training=TrainingSettings(),
        clients={"a": ClientData(client, NONE, NONE, NONE)},
        state=method.init({}).advance_round() if round else method.init({}),
        ids=("a",),
        draw_order=("a",),
        target=1,
        rules=STRICT,
        transport=cast(Any, None),
        run="",
    )
    limit = PlaintextAggregation(context, Tally()).compute_reply_bytes(client)

    # The client's budget, 4 slots for each of two layers, is spent on the wide one, as its data may have it.
    active, shape = ("B", (wide.out_features, RANK)) if round == 0 else ("A", (RANK, wide.in_features))
    empty = (narrow.out_features, 0) if round == 0 else (0, narrow.in_features)
    tensors = {
        "narrow/slots": torch.zeros(0, dtype=torch.int32),
        f"narrow/d{active}": torch.zeros(empty),
        "wide/slots": torch.arange(RANK, dtype=torch.int32),
        f"wide/d{active}": torch.ones(shape),
    }
    reply = Message(tensors, {"active": active})
    method.contribute(reply, client)  # it is one that the server accepts
    assert len(serialization.encode(reply)) <= limit < 2 * len(serialization.encode(reply))
