"""Parts of the door's own requests: what is joined comes apart again, and nothing else does."""

from __future__ import annotations

import pytest

from fedspan.transports.flower.wire import format_reply_limit, pack, parse_reply_limit, select_fitting, unpack


@pytest.mark.parametrize("parts", [[], [b""], [b"", b"a", bytes(1000)], [b"abc"] * 64])
def test_what_is_joined_comes_apart(parts: list[bytes]) -> None:
    assert unpack(pack(parts), 64) == parts


@pytest.mark.parametrize("data", [b"\0", b"\0\0\0", b"\0\0\0\1", b"\xff\xff\xff\xff" + bytes(9), pack([b"abc"])[:-1]])
def test_what_was_not_joined_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not at most 64 parts"):
        unpack(data, 64)


def test_an_order_names_the_maximum_size_of_its_reply() -> None:
    assert [parse_reply_limit(format_reply_limit(limit)) for limit in (None, 0, 2**40)] == [None, 0, 2**40]
    for group in ("", "3", "reply-bytes:", "reply-bytes:-1", "reply-bytes:1.5", "reply-bytes:" + "9" * 20):
        assert parse_reply_limit(group) is None


def test_parts_are_few() -> None:
    with pytest.raises(ValueError, match="not at most 2 parts"):
        unpack(pack([b""] * 3), 2)


def test_contents_come_along_up_to_a_size() -> None:
    computed: list[int] = []

    def contents() -> object:
        for size in (3, 4, 9, 1):
            computed.append(size)
            yield bytes(size)

    assert select_fitting(contents(), 8) == [bytes(3), bytes(4)]  # type: ignore[arg-type]
    assert computed == [3, 4, 9]
