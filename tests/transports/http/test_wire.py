"""The form of messages and of the headers that name a part of one, or what a node does."""

import pytest

from fedspan.transports.http.signing import join_message, split_message
from fedspan.transports.http.wire import NodeWork, pack, parse_range, parse_work, unpack


@pytest.mark.parametrize("parts", [[], [b""], [b"", b"a", bytes(1000)], [b"abc"] * 64])
def test_what_is_joined_comes_apart(parts: list[bytes]) -> None:
    assert unpack(pack(parts), len(parts)) == parts
    head, body = split_message(join_message(b"head") + pack(parts))
    assert (head, bytes(body)) == (b"head", pack(parts))


@pytest.mark.parametrize(
    "data", [b"\0", b"\0\0\0\1", b"\xff\xff\xff\xff" + bytes(9), pack([b"abc"])[:-1], pack([b""] * 3)]
)
def test_what_was_not_joined_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not 2 parts"):
        unpack(data, 2)
    with pytest.raises(ValueError, match="another version"):
        split_message(b"\2" + data)
    with pytest.raises(ValueError, match="cut off"):
        split_message(join_message(bytes(99))[:-1])


@pytest.mark.parametrize(
    ("text", "start"),
    [("bytes=5-", 5), ("", 0), ("bytes=5-6", 0), ("bytes=-5", 0), ("5", 0), ("bytes=" + "9" * 16 + "-", 0)],
)
def test_a_range_has_a_first_byte(text: str, start: int) -> None:
    assert parse_range(text) == start


@pytest.mark.parametrize(
    ("text", "work"),
    [
        ("training/37", ("training", 37)),
        ("hidden states/", ("hidden states", None)),
        ("training/900", ("training", 100)),
        ("", None),
        ("training", None),
        ("training/-1", None),
        ("<b>training</b>/3", None),
        ("Training/3", None),
        ("t" * 32 + "/3", None),
        ("training/3\n", None),
        ("träge/3", None),
    ],
)
def test_a_node_says_what_it_does_in_small_letters(text: str, work: tuple[str, int | None] | None) -> None:
    assert parse_work(text) == work
    if work is not None and work[1] != 100:
        assert NodeWork(*work).to_text() == text
