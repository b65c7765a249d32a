"""Draws that depend on a key."""

from __future__ import annotations

import datasets

from helpers.label_counts import counts


def test_values_of_a_column_have_draws_of_their_own() -> None:
    """Else the first clients of all wards would have the same labels."""
    data = datasets.Dataset.from_dict(
        {"text": ["t"] * 240, "label": [row % 4 for row in range(240)], "ward": ["a"] * 120 + ["b"] * 120}
    )
    held = counts(data, partitioner="dirichlet", column="ward", clients=4, alpha=0.5)
    assert held[0].tolist() != held[2].tolist()
    alone = counts(data.select(range(120)), partitioner="dirichlet", column="ward", clients=2, alpha=0.5)
    assert alone.tolist() == held[:2].tolist()  # nor do they depend on which other values there are
