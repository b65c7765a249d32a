"""Which factor trains when, and what a client lacks that was away for any number of rounds."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedspan.core.factors import cut_slots, get_alternating_factor, list_alternating_factors


@given(st.integers(0, 30), st.one_of(st.none(), st.integers(0, 30)))
def test_a_client_is_sent_what_changed_since_it_was_here(round: int, held: int | None) -> None:
    """Against a history of factors, each named after the round that made it."""
    held = None if held is None else min(held, round)
    state, history = {"A": "initial", "B": "initial"}, [{"A": "initial", "B": "initial"}]
    for number in range(round):
        state = {**state, get_alternating_factor(number): f"of round {number}"}
        history.append(state)
    known = history[held or 0]
    assert set(list_alternating_factors(round, held)) == {slot for slot in "AB" if known[slot] != history[round][slot]}


def test_B_comes_first() -> None:
    assert [get_alternating_factor(number) for number in range(4)] == ["B", "A", "B", "A"]


def test_cut_slots_copies_the_first_slots() -> None:
    tensors = {"one/A": torch.arange(6.0).reshape(3, 2), "one/B": torch.arange(12.0).reshape(4, 3)}
    cut = cut_slots(tensors, 2)
    assert cut["one/A"].tolist() == [[0, 1], [2, 3]]
    assert cut["one/B"].tolist() == [[0, 1], [3, 4], [6, 7], [9, 10]]
    assert all(
        value.is_contiguous() and value.untyped_storage().nbytes() == 4 * value.numel() for value in cut.values()
    )
