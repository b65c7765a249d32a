"""Bodies in parts: they are put together in order and no other way, and what is kept of them is bounded."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

uploads = pytest.importorskip("fedspan.transports.flower.uploads", reason="the extra fedspan[flower] is not installed")
limits = pytest.importorskip("fedspan.transports.flower.limits")
wire = pytest.importorskip("fedspan.transports.flower.wire")

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
