"""Lines of the log about a message on its way."""

from __future__ import annotations

import hashlib
import logging

import pytest

uploads = pytest.importorskip("fedspan.transports.flower.uploads", reason="the extra fedspan[flower] is not installed")
limits = pytest.importorskip("fedspan.transports.flower.limits")
progress = pytest.importorskip("fedspan.transports.flower.progress")
wire = pytest.importorskip("fedspan.transports.flower.wire")

BODY = bytes(range(200)) * 5
DIGEST = hashlib.sha256(BODY).hexdigest()


def test_progress_of_a_message_is_logged_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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
