"""Who masks with whom: mutual, connected, unpredictable neighborhoods and their threshold."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fedspan.crypto.graph import compute_threshold, select_neighborhoods


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 90), st.one_of(st.none(), st.integers(2, 20)))
def test_neighbors_are_mutual_alike_in_number_and_all_are_connected(clients: int, neighbors: int | None) -> None:
    ids = [f"client-{number:03d}" for number in range(clients)]
    around = select_neighborhoods(ids, neighbors)
    assert set(around) == set(ids)
    for id, members in around.items():
        assert id in members
        assert list(members) == sorted(set(members))
        assert all(id in around[other] for other in members)
    assert len({len(members) for members in around.values()}) == 1
    size = len(around[ids[0]])
    assert size == (clients if neighbors is None else min(clients, 1 + neighbors + neighbors % 2))
    reached, edge = {ids[0]}, [ids[0]]
    while edge:
        new = set(around[edge.pop()]) - reached
        reached |= new
        edge += new
    assert reached == set(ids)


def test_nobody_can_foresee_who_is_whose_neighbor() -> None:
    ids = [f"client-{number:03d}" for number in range(200)]
    assert select_neighborhoods(ids, 6) != select_neighborhoods(ids, 6)
    assert {len(members) for members in select_neighborhoods(ids).values()} == {101}


@given(st.integers(2, 400), st.floats(0.5, 1.0, exclude_min=True))
def test_no_two_groups_without_a_common_client_can_open_a_secret(size: int, share: float) -> None:
    threshold = compute_threshold(size, share)
    assert size < 2 * threshold
    assert share * size - 1e-6 <= threshold <= size
    assert [compute_threshold(size, 2 / 3) for size in (2, 3, 4, 6, 9, 21)] == [2, 2, 3, 4, 6, 14]
