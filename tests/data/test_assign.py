"""How examples are assigned to clients."""

from __future__ import annotations

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspan.data import PartitionConfig
from fedspan.data.partition import partition
from fedspan.errors import FedspanError
from helpers.label_counts import LABELS, counts


def test_iid_sizes_differ_by_at_most_one_and_labels_are_mixed(messages: datasets.Dataset) -> None:
    held = counts(messages, clients=7)
    assert np.ptp(held.sum(axis=1)) <= 1
    assert held.min() >= 1


def test_a_small_alpha_is_more_skewed_than_a_large_one(messages: datasets.Dataset) -> None:
    def largest_share(alpha: float) -> float:
        held = counts(messages, partitioner="dirichlet", clients=5, alpha=alpha)
        return float(np.mean(held.max(axis=1) / held.sum(axis=1)))

    assert largest_share(0.1) > 1.5 * largest_share(10)
    assert largest_share(1000) < 0.16  # of 8 labels: 0.125 each


@settings(max_examples=20, deadline=None)
@given(clients=st.integers(1, 12), classes=st.integers(1, 8), seed=st.integers(0, 2**32))
def test_pathological_clients_hold_few_labels_and_all_are_held(
    messages: datasets.Dataset, clients: int, classes: int, seed: int
) -> None:
    config = PartitionConfig(partitioner="pathological", clients=clients, classes_per_client=classes)
    if clients * classes < 8:
        with pytest.raises(FedspanError, match="all 8 labels must be held"):
            partition(messages, config, seed)
        return
    table = partition(messages, config, seed).label_table(LABELS, messages)
    held = np.array([row.counts for row in table])
    assert (np.count_nonzero(held, axis=1) <= classes).all()
    assert held.sum(axis=0).tolist() == [50] * 8


def test_quantities_grow_as_named(messages: datasets.Dataset) -> None:
    linear = counts(messages, partitioner="quantity", clients=4).sum(axis=1)
    square = counts(messages, partitioner="quantity", clients=4, quantity="square").sum(axis=1)
    exponential = counts(messages, partitioner="quantity", clients=4, quantity="exponential").sum(axis=1)
    assert linear.tolist() == [40, 80, 120, 160]
    assert square.tolist() == [13, 53, 120, 214]
    assert np.allclose(exponential[1:] / exponential[:-1], np.e, rtol=0.1)
