"""Parts of the door's own requests: what is joined comes apart again, and nothing else does."""

from __future__ import annotations

import pytest

from fedspan.transports.flower.wire import (
    WORK_HEADER,
    NodeWork,
    UploadPart,
    format_reply_limit,
    pack,
    parse_offset,
    parse_reply_limit,
    parse_upload,
    parse_work,
    read_first,
    select_fitting,
    unpack,
)


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


def test_a_part_of_a_body_is_declared_in_a_header() -> None:
    part = UploadPart("ab" * 32, 5, 7, 100, 200)
    assert parse_upload({b"fedspan-upload": part.to_header().encode()}) == part
    assert parse_upload({b"other": b"value"}) is None


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"ab" * 32,
        b"ab" * 32 + b"/8/7/0/0",
        b"AB" * 32 + b"/0/7/0/0",
        b"ab" * 32 + b"/-1/7/0/0",
        b"ab" * 32 + b"/0/12345678901/0/0",
        b"ab" * 32 + b"/0/7/0/0\n",
        b"ab" * 32 + b"/0/\xd9\xa7/0/0",
    ],
)
def test_what_declares_no_part_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError, match="not a SHA-256 and four numbers"):
        parse_upload({b"fedspan-upload": value})


@pytest.mark.parametrize(
    ("range", "tag", "offset"),
    [
        (b"bytes=5-", b'"t"', 5),
        (b"bytes=9-", b'"t"', 9),
        (b"bytes=10-", b'"t"', 0),
        (b"bytes=5-6", b'"t"', 0),
        (b"bytes=-5", b'"t"', 0),
        (b"bytes=5-", b'"u"', 0),
        (b"5", b'"t"', 0),
    ],
)
def test_the_rest_of_an_answer_is_sent_to_those_that_have_its_beginning(range: bytes, tag: bytes, offset: int) -> None:
    assert parse_offset({b"range": range, b"if-range": tag}, '"t"', 10) == offset


def test_the_first_part_is_read_without_the_others() -> None:
    assert read_first(pack([b"abc", bytes(1000)])) == b"abc"
    assert read_first(b"") == b""


@pytest.mark.parametrize(
    ("value", "work"),
    [
        (b"training/37", ("training", 37)),
        (b"hidden states/", ("hidden states", None)),
        (b"training/900", ("training", 100)),
        (b"", None),
        (b"training", None),
        (b"training/-1", None),
        (b"<b>training</b>/3", None),
        (b"Training/3", None),
        (b"t" * 32 + b"/3", None),
        (b"training/3\n", None),
        ("träge/3".encode(), None),
    ],
)
def test_a_node_says_what_it_does_in_small_letters(value: bytes, work: tuple[str, int | None] | None) -> None:
    assert parse_work({WORK_HEADER.encode(): value}) == work
    assert parse_work({}) is None
    if work is not None and work[1] != 100:
        assert NodeWork(*work).to_header().encode() == value
