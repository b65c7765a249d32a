"""How a cohort is cut into stacks, and how workers share them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("ray", reason="the extra fedspan[cluster] is not installed")

from fedspan.transports.ray.team import Piece, Queues
from fedspan.transports.ray.transport import cut_stacks

WORK = st.dictionaries(st.text(max_size=3), st.integers(0, 10_000), max_size=60)


@given(work=WORK, most=st.integers(1, 40), workers=st.integers(1, 8))
def test_stacks_hold_every_client_once_and_the_largest_first(work: dict[str, int], most: int, workers: int) -> None:
    stacks = cut_stacks(work, most, workers)
    clients = [id for stack in stacks for id in stack]
    assert sorted(clients) == sorted(work)
    assert [work[id] for id in clients] == sorted(work.values(), reverse=True)
    assert all(1 <= len(stack) <= min(most, math.ceil(len(work) / workers)) for stack in stacks)
    assert cut_stacks(dict(reversed(work.items())), most, workers) == stacks  # from the data alone


@given(count=st.integers(1, 100), most=st.integers(1, 40), workers=st.integers(1, 8))
def test_equal_clients_occupy_all_workers_equally(count: int, most: int, workers: int) -> None:
    stacks = cut_stacks({f"{number:03}": 7 for number in range(count)}, most, workers)
    sizes = [len(stack) for stack in stacks]
    assert max(sizes) - min(sizes) <= 1
    assert len(stacks) % workers == 0 or max(sizes) == 1


def test_a_client_with_half_of_the_work_has_a_stack_of_its_own() -> None:
    work = {"large": 800, **{f"small-{number}": 100 for number in range(8)}}
    stacks = cut_stacks(work, 8, 2)
    assert stacks[0] == ["large"]
    assert {len(stack) for stack in stacks[1:]} <= {3, 4, 5}


def test_an_idle_worker_takes_the_last_piece_of_the_busiest() -> None:
    pieces = [Piece(str(number), load) for number, load in enumerate([9, 5, 4, 8, 1])]
    queues = Queues([pieces[:3], pieces[3:], []])
    assert queues.take(1) is pieces[3]
    assert queues.take(2) is pieces[2]  # nothing of its own
    queues.put_back(pieces[3])
    assert queues.take(0) is pieces[3]  # a lost piece goes first
    last = [queues.take(1) for _ in range(4)]
    assert [piece.content for piece in last if piece is not None] == ["4", "1", "0"]
    assert last[-1] is None
    assert not queues


def test_pieces_that_cannot_move_wait_for_their_worker() -> None:
    """As the hidden states that a worker computes for the clients that it will train."""
    pieces, lost = [Piece(number, 1) for number in range(3)], set[int]()
    queues = Queues([pieces[:1], pieces[1:], []], lost.__contains__)
    assert queues.take(2) is None
    assert queues.take(0) is pieces[0]
    assert queues.take(0) is None
    queues.put_back(pieces[0])
    assert queues.take(2) is pieces[0]  # its worker died
    lost.add(1)
    assert queues.take(2) is pieces[2]
    assert queues.take(1) is pieces[1]
    assert not queues
