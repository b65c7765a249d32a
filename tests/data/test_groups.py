"""Whole groups."""

from __future__ import annotations

import numpy as np
import pytest

from fedspan.data.groups import draw_groups


@pytest.mark.parametrize("count", [1, 10, 29])
def test_whole_groups_are_drawn(count: int) -> None:
    groups = np.repeat(np.arange(10), 3)
    drawn = draw_groups(groups, count, np.random.default_rng(0))
    assert len(drawn) % 3 == 0
    assert 0 < len(drawn) < 30
    assert abs(len(drawn) - count) <= 2
    assert len(draw_groups(np.zeros(5, np.int64), 1, np.random.default_rng(0))) == 0


def test_whole_groups_are_drawn_with_each_label_in_proportion() -> None:
    """60 patients with 1 to 6 visits each, a third of them of the rare label."""
    rng = np.random.default_rng(1)
    sizes = rng.integers(1, 7, 60)
    groups, labels = np.repeat(np.arange(60), sizes), np.repeat(np.arange(60) % 3 == 0, sizes).astype(np.int64)
    for seed in range(20):
        drawn = draw_groups(groups, len(groups) // 5, np.random.default_rng(seed), labels)
        rest = np.setdiff1d(np.arange(len(groups)), drawn)
        assert not set(groups[drawn]) & set(groups[rest])
        # Each label is at most half of a group of the largest size away from its share.
        assert np.abs(np.bincount(labels[drawn]) - np.bincount(labels) / 5).max() <= 3
    mixed = rng.integers(0, 3, len(groups))  # groups of several labels
    drawn = draw_groups(groups, len(groups) // 4, np.random.default_rng(0), mixed)
    assert np.abs(np.bincount(mixed[drawn], minlength=3) - np.bincount(mixed) / 4).max() <= 3
