"""The numbers of a layer's updates, against what dense matrices say, and the height of a barrier."""

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedspan.core.base import Delta
from fedspan.core.lowrank import LowRank
from fedspan.diagnostics.round_diagnosis import Barrier
from fedspan.diagnostics.updates import (
    combine_deltas,
    compare_updates,
    compute_form_inner_product,
    compute_principal_angles,
    compute_singular_values,
    measure_moment_mismatch,
    measure_shape,
)

O, I = 7, 5  # noqa: E741


def draw(rng: torch.Generator, rank: int, dense: bool) -> Delta:
    pair = LowRank(torch.randn(O, rank, generator=rng), torch.randn(rank, I, generator=rng), 0.5)
    return pair.to_dense() if dense else pair


def matrix(delta: Delta) -> Tensor:
    return delta.to(torch.float64).to_dense() if isinstance(delta, LowRank) else delta.double()


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**20), st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=4))
def test_numbers_of_factors_are_those_of_dense_matrices(seed: int, kinds: list[tuple[int, bool]]) -> None:
    rng = torch.Generator().manual_seed(seed)
    updates = {f"c{number}": draw(rng, *kind) for number, kind in enumerate(kinds)}
    weights = {id: float(number + 1) for number, id in enumerate(updates)}
    whole = draw(rng, 3, seed % 2 == 0)
    found = compare_updates(updates, weights, whole)

    total = sum(weights.values())
    D = {id: matrix(one) for id, one in updates.items()}
    G, mean = matrix(whole), sum((weights[id] / total * one for id, one in D.items()), torch.zeros(O, I).double())

    def cos(left: Tensor, right: Tensor) -> float:
        return float((left * right).sum() / left.norm() / right.norm())

    spread = sum(weights[id] / total * float((one - mean).norm()) ** 2 for id, one in D.items())
    assert found.aggregation_error == pytest.approx(float((G - mean).norm() / mean.norm()), rel=1e-6)
    assert found.drift == pytest.approx(math.sqrt(spread) / float(mean.norm()), rel=1e-6, abs=1e-6)
    assert found.alignment == pytest.approx(sum(cos(one, G) for one in D.values()) / len(D), abs=1e-9)
    pairs = list(combinations(D.values(), 2))
    if pairs:
        assert found.agreement == pytest.approx(sum(cos(*pair) for pair in pairs) / len(pairs), abs=1e-6)
    else:
        assert math.isnan(found.agreement)
        assert math.isnan(found.angle_out)


def test_without_a_global_model_the_mean_is_what_updates_are_aligned_with() -> None:
    rng = torch.Generator().manual_seed(0)
    updates = {id: draw(rng, 2, False) for id in "ab"}
    found = compare_updates(updates, {"a": 1, "b": 3}, None)
    mean = combine_deltas([(0.25, updates["a"]), (0.75, updates["b"])], (O, I))
    with_mean = compare_updates(updates, {"a": 1, "b": 3}, mean)
    assert math.isnan(found.aggregation_error)
    assert with_mean.aggregation_error < 1e-12
    assert found.alignment == pytest.approx(with_mean.alignment)


def test_nearly_nothing_is_not_lost_in_rounding() -> None:
    rng = torch.Generator().manual_seed(0)
    updates = {id: draw(rng, 2, False) for id in "ab"}
    mean = combine_deltas([(0.5, updates["a"]), (0.5, updates["b"])], (O, I))
    off = LowRank(torch.full((O, 1), 1e-9), torch.ones(1, I))
    found = compare_updates(updates, {"a": 1, "b": 1}, combine_deltas([(1.0, mean), (1.0, off)], (O, I)))
    assert found.aggregation_error == pytest.approx(1e-9 * math.sqrt(O * I) / float(matrix(mean).norm()), rel=1e-3)


def test_angles_between_known_subspaces() -> None:
    eye, turned = torch.eye(4).double(), torch.tensor([[1.0, 0], [0, 0.5], [0, math.sqrt(0.75)], [0, 0]]).double()
    assert torch.allclose(compute_principal_angles(eye[:, :2], turned), torch.tensor([0.0, 60.0]).double(), atol=1e-5)
    assert torch.allclose(compute_principal_angles(eye[:, :1], eye[:, 2:]), torch.tensor([90.0]).double())
    frozen = torch.randn(2, I, generator=torch.Generator().manual_seed(1))
    rng = torch.Generator().manual_seed(2)
    updates = {id: LowRank(torch.randn(O, 2, generator=rng), frozen) for id in "abc"}
    found = compare_updates(updates, dict.fromkeys("abc", 1.0), None)
    assert found.angle_in < 1e-3
    assert found.angle_out > 20


def test_ranks_of_known_spectra() -> None:
    diagonal = torch.zeros(O, I)
    diagonal[:3, :3] = torch.diag(torch.tensor([2.0, 2.0, 2.0]))
    assert measure_shape(diagonal).stable_rank == pytest.approx(3)
    assert measure_shape(diagonal).effective_rank == pytest.approx(3)
    assert measure_shape(diagonal).norm == pytest.approx(math.sqrt(12))
    pair = LowRank(torch.randn(O, 2), torch.randn(2, I), 3.0)
    wanted = torch.linalg.svdvals(matrix(pair))[:2]
    assert torch.allclose(compute_singular_values(pair), wanted, rtol=1e-5)
    zero = measure_shape(torch.zeros(O, I))
    assert zero.norm == 0
    assert math.isnan(zero.stable_rank)


def test_products_of_every_kind_of_two() -> None:
    rng = torch.Generator().manual_seed(3)
    kinds = [draw(rng, 2, dense) for dense in (False, True)]
    for left in kinds:
        for right in kinds:
            wanted = float((matrix(left) * matrix(right)).sum())
            assert compute_form_inner_product(left, right) == pytest.approx(wanted, rel=1e-5)


def test_moments_apart() -> None:
    one = torch.tensor([1.0, 1.0])
    assert measure_moment_mismatch({"a": one, "b": one}, {"a": 1, "b": 5}) == 0
    assert measure_moment_mismatch({"a": one, "b": 3 * one}, {"a": 1, "b": 1}) == pytest.approx(0.5)
    assert measure_moment_mismatch({"a": one, "b": 3 * one}, {"a": 3, "b": 1}) == pytest.approx(math.sqrt(0.75) / 1.5)


def test_of_nobody() -> None:
    with pytest.raises(ValueError, match="no client"):
        compare_updates({}, {}, None)


def test_how_high_a_barrier_is() -> None:
    assert Barrier(("a", "b"), (1.0, 1.5, 2.5, 2.0, 3.0)).height == pytest.approx(0.5)
    assert Barrier(("a", "b"), (1.0, 1.1, 1.2, 1.3, 3.0)).height == 0
