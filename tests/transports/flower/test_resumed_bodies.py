"""Bodies that arrive in parts: each continues what has arrived, the whole has its hash, and answers are kept."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest

resumed = pytest.importorskip(
    "fedspan.transports.flower.resumed_bodies", reason="the extra fedspan[flower] is not installed"
)
bodies = pytest.importorskip("fedspan.transports.flower.bodies")
limits = pytest.importorskip("fedspan.transports.flower.limits")
progress = pytest.importorskip("fedspan.transports.flower.progress")
wire = pytest.importorskip("fedspan.transports.flower.wire")

BODY = b"0123456789"
DIGEST = hashlib.sha256(BODY).hexdigest()
KEY = b"key of the node"


def receiver(content: bytes, *, is_broken: bool = False) -> Any:
    messages = [{"type": "http.request", "body": content, "more_body": is_broken}, {"type": "http.disconnect"}]
    left = iter(messages)

    async def receive() -> dict[str, Any]:
        return next(left)

    return receive


async def send(kept: Any, content: bytes, offset: int, *, is_broken: bool = False, **changes: Any) -> bytes:
    part = wire.UploadPart(changes.get("digest", DIGEST), offset, len(BODY))
    length = changes.get("length", len(BODY) - offset)
    receive = receiver(content, is_broken=is_broken)
    return await kept.read_part(receive, length, part, changes.get("key", KEY), "east", progress.ProgressClock())


async def refuse(status: int, sending: Any) -> None:
    with pytest.raises(bodies.Refused) as caught:
        await sending
    assert caught.value.status == status


async def test_a_body_is_continued_from_where_its_connection_broke() -> None:
    kept = resumed.ResumedBodies(limits.DoorLimits())
    assert await kept.find_offset(DIGEST.encode(), KEY) == b"0"
    await refuse(400, send(kept, BODY[:4], 0, is_broken=True))
    assert await kept.find_offset(DIGEST.encode(), KEY) == b"4"
    assert await kept.find_offset(DIGEST.encode(), b"another key") == b"0"
    await refuse(416, send(kept, BODY[6:], 6))  # bytes are missing in between
    assert await send(kept, BODY[4:], 4) == BODY


async def test_a_whole_body_needs_one_request() -> None:
    kept = resumed.ResumedBodies(limits.DoorLimits())
    assert await send(kept, BODY, 0) == BODY
    assert await send(kept, BODY, 0, key=None) == BODY


async def test_a_part_that_does_not_end_with_its_body_or_makes_another_one_is_refused() -> None:
    kept = resumed.ResumedBodies(limits.DoorLimits())
    await refuse(400, send(kept, BODY[:4], 0, length=4))
    await refuse(400, send(kept, BODY[:4], 0, is_broken=True))
    await refuse(400, send(kept, b"altered"[:6], 4))
    assert await kept.find_offset(DIGEST.encode(), KEY) == b"0"


async def test_the_answer_to_a_body_is_kept_for_its_node() -> None:
    kept = resumed.ResumedBodies(limits.DoorLimits())
    part = wire.UploadPart(DIGEST, 0, len(BODY))
    await send(kept, BODY, 0)
    async with kept.keep_answer(KEY, part) as keep:
        keep(b"stored")
    assert await kept.find_offset(DIGEST.encode(), KEY) == wire.TAKEN + b"stored"
    assert await kept.find_offset(DIGEST.encode(), b"another key") == b"0"
    async with kept.keep_answer(KEY, None) as keep:
        keep(b"of a body that came without a hash")


@pytest.mark.parametrize("digest", [b"", b"a" * 63, b"a" * 65, b"*" * 64])
def test_an_offset_is_that_of_a_hash(digest: bytes) -> None:
    kept = resumed.ResumedBodies(limits.DoorLimits())
    asyncio.run(refuse(400, kept.find_offset(digest, KEY)))
