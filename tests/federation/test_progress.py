"""Reasons of failures, printable whoever words them."""

from __future__ import annotations

from fedspan.federation.progress import Failure

ESCAPES = "\x1b]0;title\x07\x1b[2J\u202e"


def test_the_reason_of_a_failure_is_printable_whoever_words_it() -> None:
    failure = Failure("a", 0, ESCAPES + "b" * 10_000)
    assert failure.reason.startswith(r"\x1b]0;title\x07\x1b[2J\u202eb")
    assert len(failure.reason) < 5000
