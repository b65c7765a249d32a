"""Prompts that are too long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fedspan.tasks.prompts import truncate


@given(st.integers(1, 40), st.integers(1, 40), st.integers(2, 32), st.booleans())
def test_the_prompt_gives_way_before_the_answer(prompt: int, answer: int, length: int, keep_first: bool) -> None:
    given_ids, learnt = list(range(prompt)), list(range(100, 100 + answer))
    kept, rest = truncate(given_ids, learnt, length, keep_first)
    assert len(kept) >= 1
    assert len(rest) >= 1
    assert len(kept) + len(rest) == min(length, prompt + answer)
    assert rest == learnt[: len(rest)]
    assert kept[1:] == given_ids[len(given_ids) - len(kept) + 1 :]  # the end of the prompt, which the answer follows
    assert kept[0] == (0 if keep_first else given_ids[-len(kept)])
    if len(rest) < answer:  # only where the prompt is at its shortest already
        assert len(kept) == min(prompt, max(1, length // 4))
    if prompt + answer <= length:
        assert (kept, rest) == (given_ids, learnt)
