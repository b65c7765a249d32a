"""Answers to requests for files of base models: an offered file from an offset on, and nothing else of the disk."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

answers = pytest.importorskip(
    "fedspan.transports.flower.base_answers", reason="the extra fedspan[flower] is not installed"
)
bodies = pytest.importorskip("fedspan.transports.flower.bodies")
wire = pytest.importorskip("fedspan.transports.flower.wire")

OFFER, FILE, OTHER = "a" * 64, "b" * 64, "c" * 64


def fetch(offers: Path | None, *parts: bytes) -> tuple[bytes, int, int]:
    return asyncio.run(answers.fetch_base(offers, wire.pack(list(parts))))


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
    monkeypatch.setattr(answers, "BASE_BYTES", 4)
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
