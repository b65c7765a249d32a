"""Markers of nodes' books: the first book of a new key, and keys that continue the book of another."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedspan.deployment.usage_markers import (
    FIRST,
    allow_first_book,
    continue_book,
    link_marker,
    read_marker,
    read_marker_text,
    require_book,
    write_marker,
)
from fedspan.errors import FedspanError


def test_a_new_key_may_create_its_first_book(tmp_path: Path) -> None:
    key = tmp_path / "east.pem"
    with pytest.raises(FedspanError, match=r"with 'east\.pem\.budget' beside it") as caught:
        require_book(key)
    assert caught.value.field == "--replaces"
    allow_first_book(key)
    require_book(key)
    marker = tmp_path / "east.pem.budget"
    assert read_marker(marker) == FIRST
    assert marker.stat().st_mode & 0o777 == 0o600


def test_a_key_that_replaces_another_continues_its_book(tmp_path: Path) -> None:
    """Also one in another folder, and both may be moved together."""
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    first, second = tmp_path / "old" / "a.pem", tmp_path / "new" / "b.pem"
    with pytest.raises(FedspanError, match="the key that the node used before"):
        continue_book(second, first)
    assert not (tmp_path / "new" / "b.pem.budget").exists()
    write_marker(tmp_path / "old" / "a.pem.budget", "digest of the book")
    continue_book(second, first)
    assert read_marker(tmp_path / "new" / "b.pem.budget") == "digest of the book"
    assert read_marker_text(tmp_path / "new" / "b.pem.budget") == "continues ../old/a.pem.budget"
    write_marker(tmp_path / "old" / "a.pem.budget", "a later digest")
    assert read_marker(tmp_path / "new" / "b.pem.budget") == "a later digest"
    (tmp_path / "moved").mkdir()
    for folder in ("old", "new"):
        (tmp_path / folder).rename(tmp_path / "moved" / folder)
    assert read_marker(tmp_path / "moved" / "new" / "b.pem.budget") == "a later digest"


def test_a_chain_ends_in_a_book_or_in_nothing(tmp_path: Path) -> None:
    write_marker(tmp_path / "0.budget", "digest")
    for number in range(1, 80):
        link_marker(tmp_path / f"{number}.budget", tmp_path / str(number - 1))
    assert read_marker(tmp_path / "63.budget") == "digest"
    assert read_marker(tmp_path / "79.budget") is None  # longer than any owner's
    link_marker(tmp_path / "0.budget", tmp_path / "1")
    assert read_marker(tmp_path / "1.budget") is None  # a circle
    assert read_marker(tmp_path / "missing.budget") is None
    assert read_marker_text(tmp_path / "missing.budget") is None


def test_a_marker_that_cannot_be_written_names_the_cure(tmp_path: Path) -> None:
    with pytest.raises(FedspanError, match="Free some space on the node"):
        write_marker(tmp_path / "missing" / "a.budget", "digest")
