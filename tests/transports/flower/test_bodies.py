"""Bodies at the door: what their headers declare, and what arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

bodies = pytest.importorskip("fedspan.transports.flower.bodies", reason="the extra fedspan[flower] is not installed")
limits = pytest.importorskip("fedspan.transports.flower.limits")
uploads = pytest.importorskip("fedspan.transports.flower.uploads")
wire = pytest.importorskip("fedspan.transports.flower.wire")

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
