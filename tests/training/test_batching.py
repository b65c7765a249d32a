"""Batches are a function of (seed, key, epoch): every example once an epoch, the same in every engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspan.core.tensors import create_generator
from fedspan.training.batching import draw_epoch_batches, draw_training_batches, split_evaluation_batches

LENGTHS = np.random.default_rng(0).integers(2, 60, 1000)


def job(indices: np.ndarray, **changes: Any) -> list[list[int]]:
    options: dict[str, Any] = {"batch_size": 4, "epochs": 2, "batches": None, "seed": 1, "key": (0, "a", "train")}
    options = {**options, "group_by_length": True, **changes}
    return [batch.tolist() for batch in draw_training_batches(indices, LENGTHS, **options)]


@settings(deadline=None)
@given(st.integers(0, 100), st.integers(1, 20), st.booleans(), st.integers(0, 5))
def test_an_epoch_is_every_example_once(count: int, size: int, grouped: bool, seed: int) -> None:
    indices = np.arange(3, 3 + count)
    batches = draw_epoch_batches(indices, LENGTHS, size, create_generator(seed, "x"), grouped)
    assert sorted(np.concatenate([*batches, np.array([], dtype=int)]).tolist()) == indices.tolist()
    assert len(batches) == -(-count // size)
    assert all(0 < len(batch) <= size for batch in batches)
    assert sum(len(batch) < size for batch in batches) <= 1


def test_grouping_by_length_saves_padding_and_still_shuffles() -> None:
    """Padded tokens fall by more than half of what can be saved; batches differ from epoch to epoch."""

    def padding(batches: list[list[int]]) -> int:
        return sum(len(batch) * LENGTHS[batch].max() for batch in batches) - int(LENGTHS.sum())

    plain, grouped = (job(np.arange(1000), epochs=1, group_by_length=on) for on in (False, True))
    assert padding(grouped) < 0.5 * padding(plain)
    two = job(np.arange(1000), epochs=2)
    assert two[:250] == grouped
    assert {frozenset(batch) for batch in two[:250]}.isdisjoint({frozenset(batch) for batch in two[250:]})
    means = [LENGTHS[batch].mean() for batch in grouped]
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.3  # batches of like length do not follow each other


def test_a_number_of_batches_takes_as_many_epochs_as_that_needs() -> None:
    """Ten examples in batches of four are three batches an epoch."""
    indices = np.arange(10)
    assert job(indices, batches=7) == job(indices, epochs=3)[:7]
    assert job(indices, batches=2, epochs=50) == job(indices, epochs=1)[:2]
    assert [len(batch) for batch in job(indices, epochs=1, group_by_length=False)] == [4, 4, 2]


@pytest.mark.parametrize("change", [{"seed": 2}, {"key": (1, "a", "train")}, {"key": (0, "b", "train")}])
def test_every_part_of_the_key_counts_and_nothing_else(change: dict[str, Any]) -> None:
    indices = np.arange(40)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = job(indices)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert job(indices) == first
    assert job(indices, **change) != first


@pytest.mark.parametrize("options", [{"epochs": 3}, {"batches": 5}])
def test_no_examples_are_no_batches(options: dict[str, int]) -> None:
    assert job(np.array([], dtype=np.int64), **options) == []


@settings(deadline=None)
@given(st.integers(0, 50), st.integers(1, 20))
def test_evaluation_sees_all_by_length(count: int, size: int) -> None:
    indices = np.arange(7, 7 + count)
    batches = split_evaluation_batches(indices, LENGTHS, size)
    ordered = np.concatenate([*batches, np.array([], dtype=int)])
    assert sorted(ordered.tolist()) == indices.tolist()
    assert (np.diff(LENGTHS[ordered.astype(int)]) >= 0).all()
    assert [len(batch) for batch in batches[:-1]] == [size] * (len(batches) - 1)
