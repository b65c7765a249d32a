"""Bodies at the door: what their headers declare, what arrives, and in which parts."""

import asyncio
import hashlib
import logging
from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra fedspan[flower] is not installed")

from fedspan.transports.flower import bodies, limits, progress, uploads, wire

FAST = {"body_seconds": 5.0}


def receiver(messages: Iterable[dict[str, Any]]) -> Any:
    left = iter(messages)

    async def receive() -> dict[str, Any]:
        message = next(left, None)
        if message is None:
            await asyncio.sleep(60)
        return message or {}

    return receive


def parts(*contents: bytes) -> list[dict[str, Any]]:
    last = len(contents) - 1
    return [{"type": "http.request", "body": one, "more_body": n < last} for n, one in enumerate(contents)]


def read(messages: Iterable[dict[str, Any]], length: int, **changes: float) -> bytes:
    return asyncio.run(bodies.read_body(receiver(messages), length, limits.DoorLimits(**{**FAST, **changes})))


def test_a_declared_length_is_a_small_number_of_digits() -> None:
    assert bodies.read_declared_length({b"content-length": b"0"}, 10) == 0
    assert bodies.read_declared_length({b"content-length": b"10"}, 10) == 10
    for headers, status in (
        ({}, 411),
        ({b"content-length": b"-1"}, 411),
        ({b"content-length": b"1e3"}, 411),
        ({b"content-length": b"1" * 13}, 411),
        ({b"content-length": b"3", b"transfer-encoding": b"chunked"}, 411),
        ({b"content-length": b"11"}, 413),
    ):
        with pytest.raises(bodies.Refused) as caught:
            bodies.read_declared_length(headers, 10)
        assert caught.value.status == status


def test_a_declared_part_is_one_of_a_body_that_is_not_too_large() -> None:
    digest = "ab" * 32
    part = wire.UploadPart(digest, 3, 10, 0, 0)
    headers = {wire.UPLOAD_HEADER.encode(): part.to_header().encode()}
    assert bodies.read_declared_part(headers, 10) == part
    assert bodies.read_declared_part({}, 10) is None
    with pytest.raises(bodies.Refused, match="at most 9 bytes") as caught:
        bodies.read_declared_part(headers, 9)
    assert caught.value.status == 413
    with pytest.raises(bodies.Refused, match="not a part of a body") as caught:
        bodies.read_declared_part({wire.UPLOAD_HEADER.encode(): b"nonsense"}, 10)
    assert caught.value.status == 400


def test_a_body_is_read_whole_however_it_is_cut() -> None:
    assert read(parts(b"abc"), 3) == b"abc"
    assert read(parts(b"a", b"", b"bc"), 3) == b"abc"
    assert read(parts(b""), 0) == b""


@pytest.mark.parametrize(
    ("messages", "status", "why"),
    [
        (parts(b"ab", b"cd"), 413, "more than the declared 3 bytes"),
        (parts(b"ab"), 400, "less than the declared 3 bytes"),
        ([{"type": "http.disconnect"}], 400, "the connection was closed"),
    ],
)
def test_what_is_not_the_declared_body_is_refused(messages: list[dict[str, Any]], status: int, why: str) -> None:
    with pytest.raises(bodies.Refused, match=why) as caught:
        read(messages, 3)
    assert caught.value.status == status


def test_a_body_that_does_not_arrive_is_given_up() -> None:
    started = parts(b"a", b"bc")[:1]
    with pytest.raises(bodies.Refused, match="the body took too long") as caught:
        read(started, 3, body_seconds=0.02)
    assert caught.value.status == 408


def test_a_later_request_takes_over_a_body() -> None:
    upload = uploads.Upload(3)
    with pytest.raises(bodies.Refused, match="a later request sends this body") as caught:
        asyncio.run(bodies.read_into(receiver(parts(b"abc")), 3, limits.DoorLimits(), upload, upload.requests + 1))
    assert caught.value.status == 416
    assert b"".join(upload.parts) == b""


def test_parts_of_a_body_are_few_and_whole() -> None:
    packed = wire.pack([b"one", b"", b"three"])
    assert bodies.unpack_parts(packed, 3) == [b"one", b"", b"three"]
    for broken, most in ((packed, 2), (packed[:-1], 3), (b"nonsense", 3)):
        with pytest.raises(bodies.Refused, match=f"at most {most} parts with their lengths before them") as caught:
            bodies.unpack_parts(broken, most)
        assert caught.value.status == 400


async def test_a_body_that_was_read_is_received_again_and_then_what_follows() -> None:
    receive = bodies.make_replay(b"abc", receiver([{"type": "http.disconnect"}]))
    assert await receive() == {"type": "http.request", "body": b"abc", "more_body": False}
    assert await receive() == {"type": "http.disconnect"}


def test_a_wait_for_the_end_of_a_connection_passes_over_what_comes_before() -> None:
    asyncio.run(bodies.wait_for_disconnect(receiver([*parts(b"a", b"b"), {"type": "http.disconnect"}])))


BODY = bytes(range(200)) * 5
DIGEST = hashlib.sha256(BODY).hexdigest()


def receive(made: uploads.Uploads, start: int, end: int, *, sender: bytes = b"a", body: bytes = BODY) -> uploads.Upload:
    """Receive a part of a body, after which the connection breaks."""
    part = wire.UploadPart(hashlib.sha256(body).hexdigest(), start, len(body))
    upload = made.begin(sender, part)
    upload.append(body[start:end])
    made.interrupt(upload)
    return upload


def test_what_has_arrived_is_kept_for_the_rest() -> None:
    made = uploads.Uploads(limits.DoorLimits())
    assert made.find_offset(b"a", DIGEST) == 0
    for start, end in ((0, 300), (300, 301), (301, 900)):
        upload = receive(made, start, end)
        assert made.find_offset(b"a", DIGEST) == end
    upload = made.begin(b"a", wire.UploadPart(DIGEST, 900, 1000))
    upload.append(BODY[900:])
    assert made.finish(b"a", DIGEST, upload) == BODY
    assert made.find_offset(b"a", DIGEST) == 0  # nothing is kept of what is complete


@pytest.mark.parametrize(("offset", "total"), [(299, 1000), (301, 1000), (300, 1001), (300, 999)])
def test_a_part_that_overlaps_or_leaves_a_gap_or_has_another_total_is_refused(offset: int, total: int) -> None:
    made = uploads.Uploads(limits.DoorLimits())
    receive(made, 0, 300)
    with pytest.raises(ValueError, match="does not follow"):
        made.begin(b"a", wire.UploadPart(DIGEST, offset, total))
    assert made.find_offset(b"a", DIGEST) == 300


def test_a_node_cannot_continue_what_another_has_sent() -> None:
    made = uploads.Uploads(limits.DoorLimits())
    receive(made, 0, 300)
    assert made.find_offset(b"b", DIGEST) == 0
    with pytest.raises(ValueError, match="does not follow"):
        made.begin(b"b", wire.UploadPart(DIGEST, 300, 1000))


def test_a_body_in_parts_has_the_declared_hash() -> None:
    made = uploads.Uploads(limits.DoorLimits())
    receive(made, 0, 300)
    upload = made.begin(b"a", wire.UploadPart(DIGEST, 300, 1000))
    upload.append(bytes(700))
    with pytest.raises(ValueError, match="another SHA-256"):
        made.finish(b"a", DIGEST, upload)
    assert made.find_offset(b"a", DIGEST) == 0


def test_a_body_that_is_sent_from_the_start_again_replaces_the_first() -> None:
    made = uploads.Uploads(limits.DoorLimits())
    first = receive(made, 0, 300)
    request = first.requests
    assert made.begin(b"a", wire.UploadPart(DIGEST, 0, 1000)).size == 0
    assert first.requests != request  # its request is ended


def test_a_node_has_few_bodies_in_parts() -> None:
    made = uploads.Uploads(limits.DoorLimits(parallel=2))
    bodies = [bytes([n]) * 100 for n in range(3)]
    for body in bodies:
        receive(made, 0, 50, body=body)
    receive(made, 0, 50, sender=b"b")
    assert [made.find_offset(b"a", hashlib.sha256(body).hexdigest()) for body in bodies] == [0, 50, 50]
    assert made.find_offset(b"b", DIGEST) == 50


def test_all_nodes_together_have_a_limit_and_the_oldest_is_dropped() -> None:
    made = uploads.Uploads(limits.DoorLimits(partial_bytes=1000))
    for sender in (b"a", b"b", b"c"):
        receive(made, 0, 400, sender=sender)
    assert [made.find_offset(sender, DIGEST) for sender in (b"a", b"b", b"c")] == [0, 400, 400]


def test_what_nobody_continues_is_dropped_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made, now = uploads.Uploads(limits.DoorLimits(partial_seconds=60)), [0.0]
    monkeypatch.setattr(uploads.time, "monotonic", lambda: now[0])
    receive(made, 0, 300)
    now[0] = 59.0
    assert made.find_offset(b"a", DIGEST) == 300
    now[0] = 61.0
    assert made.find_offset(b"a", DIGEST) == 0


def test_the_answers_to_the_latest_bodies_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "_SENDERS", 2)
    made = uploads.Uploads(limits.DoorLimits())
    for number in range(6):
        made.keep_answer(b"a", str(number), b"answer")
    made.keep_answer(b"a", "large", bytes(2**16))

    def find(sender: bytes, digest: str) -> bytes | None:
        return asyncio.run(made.find_answer(sender, digest))

    assert [find(b"a", str(number)) is not None for number in range(6)] == [False] * 2 + [True] * 4
    assert find(b"a", "large") is find(b"b", "5") is None
    made.keep_answer(b"b", "x", b"answer")
    made.keep_answer(b"c", "x", b"answer")
    assert [find(sender, "x") for sender in (b"b", b"c")] == [b"answer"] * 2
    assert find(b"a", "5") is None  # of the node that has sent nothing for longest


async def test_an_answer_is_waited_for_while_its_body_is_processed() -> None:
    made = uploads.Uploads(limits.DoorLimits())
    async with made.process(b"a", DIGEST):
        waiting = asyncio.create_task(made.find_answer(b"a", DIGEST))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        made.keep_answer(b"a", DIGEST, b"answer")
    assert [await waiting, await made.find_answer(b"a", "another")] == [b"answer", None]


def test_progress_is_logged_now_and_then(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Over all requests that transmit it, and each of them may be fast."""
    made, now, clock = uploads.Uploads(limits.DoorLimits()), [0.0], progress.ProgressClock()
    monkeypatch.setattr(uploads.time, "monotonic", lambda: now[0])
    with caplog.at_level(logging.INFO, "fedspan.server"):
        for piece in range(5):
            part = wire.UploadPart(DIGEST, 0, 4_000_000, piece * 4_000_000, 20_000_000)
            upload = made.begin(b"a", part, "node 7", clock)
            for _ in range(4):
                now[0] += 0.6
                upload.append(bytes(1_000_000))
    assert caplog.messages == [f"node 7: reply received: {size}.0 of 20.0 MB" for size in (9, 18)]
