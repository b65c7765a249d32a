"""Answers of the door: from an offset on, in pieces that wait for their reader, and files of base models."""

import asyncio
import json
import logging
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra fedspan[flower] is not installed")

from fedspan.transports.flower import answers, base_answers, bodies, limits, progress, wire

CONTENT = os.urandom(wire.RESUMABLE_BYTES + 5)
TAG = wire.compute_tag(b"request", len(CONTENT))


class Sent:
    """What was sent."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    async def __call__(self, message: Any) -> None:
        self.messages.append(dict(message))

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def status(self) -> int:
        return self.messages[0]["status"]

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.messages[0]["headers"])


def continued(offset: int, tag: str = TAG) -> list[tuple[bytes, bytes]]:
    return [(b"range", b"bytes=%d-" % offset), (b"if-range", tag.encode())]


async def receive() -> dict[str, Any]:
    return {"type": "http.disconnect"}


@pytest.mark.parametrize(
    ("headers", "offset"), [([], 0), (continued(100), 100), (continued(100, TAG + "x"), 0), (continued(0), 0)]
)
def test_an_answer_begins_where_the_node_s_part_of_it_ends(headers: list[tuple[bytes, bytes]], offset: int) -> None:
    sent = Sent()
    asyncio.run(answers.send_answer(CONTENT, {"type": "http", "headers": headers}, receive, sent, TAG))
    assert sent.body == CONTENT[offset:]
    assert sent.status == (206 if offset else 200)
    assert sent.headers[b"etag"] == TAG.encode()
    size = len(CONTENT)
    ranged = f"bytes {offset}-{size - 1}/{size}".encode() if offset else None
    assert sent.headers.get(b"content-range") == ranged


def test_an_answer_without_a_tag_is_whole() -> None:
    sent = Sent()
    asyncio.run(answers.send_answer(b"abc", {"type": "http", "headers": continued(1)}, receive, sent))
    assert (sent.status, sent.body) == (200, b"abc")
    assert b"etag" not in sent.headers


@pytest.mark.parametrize("cuts", [[], [7], [0, 7, 40_000]])
@pytest.mark.parametrize("offset", [0, 12_345])
async def test_an_answer_that_comes_from_flower_is_continued_likewise(cuts: list[int], offset: int) -> None:
    sent = Sent()
    answer = answers.ResumableAnswer(sent, dict(continued(offset)) if offset else {}, b"request")
    places = [0, *cuts, len(CONTENT)]
    headers = [(b"Content-Length", b"%d" % len(CONTENT)), (b"x-kept", b"1")]
    await answer.send({"type": "http.response.start", "status": 200, "headers": headers})
    for start, end in pairwise(places):
        more = end < len(CONTENT)
        assert sent.messages == []
        await answer.send({"type": "http.response.body", "body": CONTENT[start:end], "more_body": more})
    assert sent.body == CONTENT[offset:]
    assert sent.status == (206 if offset else 200)
    assert sent.headers[b"content-length"] == b"%d" % (len(CONTENT) - offset)
    assert sent.headers[b"x-kept"] == b"1"
    assert b"Content-Length" not in sent.headers


@pytest.mark.parametrize(("status", "size"), [(404, len(CONTENT)), (200, 100)])
async def test_failed_and_short_answers_are_sent_as_they_are(status: int, size: int) -> None:
    sent = Sent()
    answer = answers.ResumableAnswer(sent, dict(continued(10)), b"request")
    await answer.send({"type": "http.response.start", "status": status, "headers": [(b"x", b"1")]})
    await answer.send({"type": "http.response.body", "body": CONTENT[:size]})
    assert (sent.status, sent.headers, sent.body) == (status, {b"x": b"1"}, CONTENT[:size])


async def test_a_long_answer_is_cut_into_pieces_the_last_of_which_ends_it() -> None:
    sent, aborted = Sent(), list[None]()
    send = answers.split_answer(sent, limits.DoorLimits(), lambda: aborted.append(None))
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": CONTENT[:150_000], "more_body": True})
    await send({"type": "http.response.body", "body": CONTENT[150_000:], "more_body": False})
    assert sent.body == CONTENT
    _, *pieces = sent.messages
    assert max(len(piece["body"]) for piece in pieces) == 2**16
    assert [piece["more_body"] for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    assert aborted == []


async def test_the_connection_of_a_node_that_does_not_read_is_closed_once() -> None:
    aborted: list[None] = []
    started: list[int] = []

    async def stuck(message: Any) -> None:
        started.append(len(message.get("body", b"")))
        await asyncio.sleep(60)

    send = answers.split_answer(stuck, limits.DoorLimits(body_seconds=0.02), lambda: aborted.append(None))
    for _ in range(3):
        await send({"type": "http.response.body", "body": b"abc"})
    assert aborted == [None]
    assert started == [3]


@pytest.mark.parametrize(("status", "kept"), [(200, [b"abcdef"]), (206, []), (500, [])])
async def test_the_content_of_an_answer_that_succeeded_is_passed_on(status: int, kept: list[bytes]) -> None:
    sent, found = Sent(), list[bytes]()
    send = answers.observe_answer(sent, found.append)
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b"abc", "more_body": True})
    assert found == []
    await send({"type": "http.response.body", "body": b"def"})
    assert found == kept
    assert sent.body == b"abcdef"


async def test_progress_is_of_the_whole_message(caplog: pytest.LogCaptureFixture) -> None:
    """Two megabytes were sent with other answers, and this one begins behind its first million bytes."""

    class Due(progress.ProgressClock):
        def is_due(self) -> bool:
            return True

    sent = Sent()
    send = answers.log_answer(sent, answers.AnswerProgress("order", "east", Due(), sent=2_000_000, total=6_000_000))
    with caplog.at_level(logging.INFO, logger="fedspan.server"):
        headers = [(b"content-length", b"3000000"), (b"content-range", b"bytes 1000000-3999999/4000000")]
        await send({"type": "http.response.start", "status": 206, "headers": headers})
        await send({"type": "http.response.body", "body": bytes(500_000), "more_body": True})
    assert [record.getMessage() for record in caplog.records] == [
        "east: order sent: 3.0 of 6.0 MB",
        "east: order sent: 3.5 of 6.0 MB",
    ]


OFFER, FILE, OTHER = "a" * 64, "b" * 64, "c" * 64


def fetch(offers: Path | None, *parts: bytes) -> tuple[bytes, int, int]:
    return asyncio.run(base_answers.fetch_base(offers, wire.pack(list(parts))))


@pytest.fixture
def offers(tmp_path: Path) -> Path:
    folder = tmp_path / "offers"
    folder.mkdir()
    (tmp_path / "weights").write_bytes(b"0123456789")
    (folder / f"{OFFER}.first.json").write_text("damaged")
    (folder / f"{OFFER}.run.json").write_text(json.dumps({FILE: str(tmp_path / "weights")}))
    return folder


def test_bytes_come_with_their_offset_and_the_file_s_size(offers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run's damaged offer of the same model does not stop it."""
    assert fetch(offers, OFFER.encode(), FILE.encode(), b"0") == (b"0123456789", 0, 10)
    assert fetch(offers, OFFER.encode(), FILE.encode(), b"7") == (b"789", 7, 10)
    monkeypatch.setattr(base_answers, "BASE_BYTES", 4)
    assert fetch(offers, OFFER.encode(), FILE.encode(), b"4") == (b"4567", 4, 10)


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ((OFFER.encode(), FILE.encode()), 400),
        ((OFFER.encode(), FILE.encode(), b"-1"), 400),
        ((OFFER.encode(), FILE.encode(), b""), 400),
        ((OFFER.encode(), FILE.encode(), b"1" * 17), 400),
        ((OFFER.encode(), FILE.encode(), b"10"), 404),  # behind its end
        ((OFFER.encode(), OTHER.encode(), b"0"), 404),
        ((OTHER.encode(), FILE.encode(), b"0"), 404),
        ((b"*" * 64, FILE.encode(), b"0"), 404),
        ((b"../" * 21 + b"a", FILE.encode(), b"0"), 404),
        ((b"a" * 63, FILE.encode(), b"0"), 404),
    ],
)
def test_any_other_request_is_refused(offers: Path, parts: tuple[bytes, ...], status: int) -> None:
    with pytest.raises(bodies.Refused) as caught:
        fetch(offers, *parts)
    assert caught.value.status == status


def test_a_server_without_offers_and_a_file_that_is_gone_have_nothing(offers: Path) -> None:
    for folder in (None, offers):
        if folder is not None:
            (offers.parent / "weights").unlink()
        with pytest.raises(bodies.Refused, match="not a file of a base model that is offered"):
            fetch(folder, OFFER.encode(), FILE.encode(), b"0")
