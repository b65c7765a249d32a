"""Entries selected from a seed."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspan.core.sparse import count_entries, draw_entries, scatter_entries


@given(
    rows=st.integers(1, 30),
    columns=st.integers(1, 30),
    density=st.floats(1e-6, 1.0),
    seed=st.integers(0, 2**63 - 1),
)
@settings(max_examples=100, deadline=None)
def test_a_mask_has_the_density_asked_for_and_follows_from_the_seed(
    rows: int, columns: int, density: float, seed: int
) -> None:
    entries = draw_entries((rows, columns), density, seed, "one")
    assert len(set(entries.tolist())) == len(entries) == count_entries((rows, columns), density)
    assert abs(len(entries) - max(1.0, density * rows * columns)) <= 0.5
    assert 0 <= int(entries.min()) <= int(entries.max()) < rows * columns
    assert torch.equal(entries, draw_entries((rows, columns), density, seed, "one"))
    dense = scatter_entries(torch.ones(len(entries)), entries, (rows, columns))
    assert dense.sum() == len(entries)
    assert all(dense[index // columns, index % columns] == 1 for index in entries.tolist())


def test_masks_are_uniform_and_differ_by_layer_and_seed() -> None:
    drawn = torch.stack(
        [scatter_entries(torch.ones(10), draw_entries((5, 8), 0.25, seed, "a"), (5, 8)) for seed in range(800)]
    )
    # Of each of 40 entries 800 draws with probability 1/4: a standard deviation of 12.2.
    assert ((drawn.sum(0) - 200).abs() < 5 * 12.3).all()
    assert not torch.equal(draw_entries((5, 8), 0.25, 0, "a"), draw_entries((5, 8), 0.25, 0, "b"))
