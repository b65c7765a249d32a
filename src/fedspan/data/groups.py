"""Groups of examples that belong together, in draws and partitions."""

from __future__ import annotations

import numpy as np

__all__ = ["draw_groups", "ordered_by_group"]


def draw_groups(groups: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw whole groups with about `count` rows together; at least one group, and not all.

    Args:
        groups: Number of each row's group, int64, (rows,).
        count: Number of rows wanted.
        rng: Generator of the draw.

    Returns:
        The rows of the drawn groups, sorted; empty if there is only one group.
    """
    rows, starts = ordered_by_group(groups, rng)
    ends = starts[1:-1]
    return np.sort(rows[: ends[np.argmin(np.abs(ends - count))]]) if len(ends) else rows[:0]


def ordered_by_group(groups: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Order rows by group, the groups at random.

    Returns:
        The positions of the rows, int64, (rows,), and the start of each group among them with the end of the last,
        int64, (groups + 1,).
    """
    _, numbers = np.unique(groups, return_inverse=True)
    place = rng.permutation(int(numbers.max()) + 1)
    rows = np.argsort(place[numbers], kind="stable").astype(np.int64)
    sizes = np.bincount(place[numbers])
    return rows, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
