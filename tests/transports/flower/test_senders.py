"""The nodes that send requests: whom the operator admitted, who waits, and what an object of a reply takes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

senders = pytest.importorskip("fedspan.transports.flower.senders", reason="the extra fedspan[flower] is not installed")
bodies = pytest.importorskip("fedspan.transports.flower.bodies")
limits = pytest.importorskip("fedspan.transports.flower.limits")

SCOPE = {"app": SimpleNamespace()}


async def test_a_node_has_one_state_and_those_longest_ago_are_forgotten_first() -> None:
    known = senders.Senders(limits.DoorLimits(rate=3.0, heartbeat_rate=0.5, parallel=1))
    first, second = known.get(b"first"), known.get(b"second")
    assert (first.requests.rate, first.heartbeats.rate) == (3.0, 0.5)
    assert known.get(b"first") is first  # which makes the second the oldest
    for number in range(4095):
        known.get(b"%d" % number)
    assert known.get(b"first") is first
    assert known.get(b"second") is not second


def test_a_node_whose_request_waits_is_not_forgotten() -> None:
    known = senders.Senders(limits.DoorLimits())
    busy = known.get(b"busy")
    busy.waiting = 1
    for number in range(5000):
        known.get(b"%d" % number)
    assert known.get(b"busy") is busy


async def test_an_admitted_key_is_looked_up_now_and_then_and_an_unknown_one_every_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bytes] = []
    nodes: dict[bytes, int] = {b"a": 7}

    def find(app: object, key: bytes) -> int | None:
        asked.append(key)
        return nodes.get(key)

    monkeypatch.setattr(senders, "find_node_id", find)
    known = senders.Senders(limits.DoorLimits())
    sender = known.get(b"a")
    for _ in range(3):
        await known.require_admitted(SCOPE, sender, b"a")
    assert asked == [b"a"]
    assert sender.node == 7
    nodes.clear()
    sender.looked_up_at -= limits.KNOWN_SECONDS
    for _ in range(2):
        with pytest.raises(bodies.Refused, match="this key was not admitted") as caught:
            await known.require_admitted(SCOPE, known.get(b"a"), b"a")
        assert caught.value.status == 401
    assert asked == [b"a"] * 3


async def test_requests_wait_for_a_slot_and_too_many_are_refused() -> None:
    known = senders.Senders(limits.DoorLimits(parallel=1, waiting=2))
    sender = known.get(b"a")
    slots = [limits.Slot(sender.slots) for _ in range(4)]
    await known.wait(sender, slots[0])
    waiting = [asyncio.create_task(known.wait(sender, slot)) for slot in slots[1:3]]
    await asyncio.sleep(0)
    assert sender.waiting == 2
    with pytest.raises(bodies.Refused, match="too many requests at once") as caught:
        await known.wait(sender, slots[3])
    assert caught.value.status == 429
    for slot, task in zip(slots, waiting, strict=False):
        slot.leave()
        await task
    assert sender.waiting == 0


def test_objects_count_once_against_the_reply_s_bytes_and_number() -> None:
    sender: Any = limits.Sender(None, limits.Bucket(1, 1), limits.Bucket(1, 1))
    senders.require_room(b"anything", None)  # of a run
    with pytest.raises(bodies.Refused, match="belong to no reply"):
        senders.require_room(b"1234", sender)
    sender.reply_left, sender.objects_left = 10, 3
    for _ in range(3):
        senders.require_room(b"1234", sender)
    assert (sender.reply_left, sender.objects_left) == (6, 2)
    with pytest.raises(bodies.Refused, match="larger or more") as caught:
        senders.require_room(b"1234567", sender)
    assert caught.value.status == 413
    senders.require_room(b"567890", sender)
    senders.require_room(b"", sender)
    assert (sender.reply_left, sender.objects_left) == (0, 0)
    with pytest.raises(bodies.Refused, match="larger or more"):
        senders.require_room(b"x"[:0] + b"y", sender)
    senders.require_room(b"1234", sender)
