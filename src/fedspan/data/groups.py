"""Groups of examples that belong together, in draws and partitions."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.sparse import coo_array


def draw_groups(
    groups: np.ndarray,
    count: int,
    rng: np.random.Generator,
    labels: np.ndarray | None = None,
    *,
    maximum: int | None = None,
) -> np.ndarray:
    """Draw whole groups with about `count` rows together, each label in proportion; at least one group, and not all.

    Groups are visited at random, and one is drawn if that brings the labels' counts nearer, by squared distance, to
    their shares of `count`. (scikit-learn's ``StratifiedGroupKFold`` makes folds of equal sizes only.)

    Args:
        groups: Number of each row's group, int64, (rows,).
        count: Number of rows wanted.
        rng: Generator of the draw.
        labels: Label of each row, int64, (rows,); None: all rows count alike.
        maximum: Largest number of groups that may be drawn; None: all but one.

    Returns:
        The rows of the drawn groups, sorted; empty if there is only one group.
    """
    numbers = np.unique(groups, return_inverse=True)[1].reshape(-1)
    sizes = np.bincount(numbers)
    maximum = len(sizes) - 1 if maximum is None else maximum
    if len(sizes) < 2 or maximum < 1:
        return np.empty(0, np.int64)
    classes = np.zeros(len(groups), np.int64) if labels is None else np.unique(labels, return_inverse=True)[1]
    counts_by_group: Any = coo_array((np.ones(len(groups), np.int64), (numbers, classes.reshape(-1)))).tocsr()
    counts_by_group.sum_duplicates()
    starts: list[int] = counts_by_group.indptr.tolist()
    columns: list[int] = counts_by_group.indices.tolist()
    counts: list[int] = counts_by_group.data.tolist()
    missing: list[float] = (np.bincount(classes.reshape(-1)) * (count / len(groups))).tolist()
    order, drawn = rng.permutation(len(sizes)), list[int]()
    for group in order.tolist():
        entries = range(starts[group], starts[group + 1])
        # With h rows of a label where d are missing, the squared distance changes by h (h - 2 d).
        if sum(counts[entry] * (counts[entry] - 2 * missing[columns[entry]]) for entry in entries) < 0:
            for entry in entries:
                missing[columns[entry]] -= counts[entry]
            drawn.append(group)
            if len(drawn) == maximum:
                break
    if not drawn:  # every group is too large
        drawn.append(int(order[np.argmin(sizes[order])]))
    return np.flatnonzero(np.isin(numbers, drawn)).astype(np.int64)
