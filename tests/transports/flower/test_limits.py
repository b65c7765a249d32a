"""Limits on the requests of one node: sizes of a reply and its announcement, rates, and slots."""

from __future__ import annotations

import asyncio
import time

import pytest

limits = pytest.importorskip("fedspan.transports.flower.limits", reason="the extra fedspan[flower] is not installed")
adapter = pytest.importorskip("fedspan.transports.flower.adapter")


class Clock:
    """A clock that stands until it is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made)
    return made


def test_the_size_of_a_reply_limits_its_objects_and_its_announcement() -> None:
    some = limits.DoorLimits(reply_bytes=10 * adapter.PIECE_BYTES - 1)
    assert some.objects == 16 + 9
    assert some.head_bytes == limits.SMALL_BYTES + 25 * 80


def test_an_order_lowers_the_limit_of_its_reply_and_never_raises_it() -> None:
    some = limits.DoorLimits(reply_bytes=1000, rate=3.0)
    assert some.restrict(10).reply_bytes == 10
    assert some.restrict(5000).reply_bytes == 1000
    assert some.restrict(10).rate == 3.0
    assert some.reply_bytes == 1000


def test_tokens_are_taken_ahead_and_refilled_up_to_a_burst(clock: Clock) -> None:
    bucket = limits.Bucket(rate=2.0, burst=3.0)
    assert [bucket.take() for _ in range(5)] == [0.0, 0.0, 0.0, 0.5, 1.0]
    clock.now += 1.0  # two tokens, which two waiting requests have taken already
    assert bucket.take() == 0.5
    clock.now += 1000.0
    assert [bucket.take() for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]


def test_a_token_that_was_given_back_is_there_for_the_next_request(clock: Clock) -> None:
    bucket = limits.Bucket(rate=2.0, burst=1.0)
    assert (bucket.take(), bucket.take()) == (0.0, 0.5)
    bucket.give_back()
    assert bucket.take() == 0.5


async def test_a_request_holds_one_slot_however_often_it_enters_and_leaves() -> None:
    slots = asyncio.Semaphore(2)
    one, two, three = (limits.Slot(slots) for _ in range(3))
    one.leave()  # it holds none
    for _ in range(2):
        await one.enter()
    await two.enter()
    assert slots.locked()
    waiting = asyncio.create_task(three.enter())
    await asyncio.sleep(0)
    assert not waiting.done()
    for _ in range(2):
        one.leave()
    await waiting
    assert slots.locked()
    two.leave()
    three.leave()
    await slots.acquire()
    await slots.acquire()
    assert slots.locked()


def test_a_new_sender_is_looked_up_at_once() -> None:
    some = limits.Sender(asyncio.Semaphore(1), limits.Bucket(1, 1), limits.Bucket(1, 1))
    assert some.node is None
    assert time.monotonic() - some.looked_up_at >= limits.KNOWN_SECONDS
