"""Procrustes against random rotations; AJIVE against its definition on dense views."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedspan.core.alignment import compute_ajive, find_nearest_rotation, solve_procrustes
from fedspan.core.lowrank import LowRank
from helpers.ajive_parts import compute_individual, lift

few = settings(max_examples=25, deadline=None)


def _randn(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=rng, dtype=torch.float64)


def _orthonormal_rows(rng: torch.Generator, rows: int, columns: int) -> Tensor:
    return torch.linalg.qr(_randn(rng, columns, rows))[0].T


@few
@given(st.integers(1, 5), st.integers(0, 1000), st.booleans())
def test_the_nearest_rotation_is_one_and_none_is_nearer(rank: int, seed: int, reflected: bool) -> None:
    rng = torch.Generator().manual_seed(seed)
    matrix = _randn(rng, rank, rank)
    if reflected:
        matrix[0] *= -1
    found = find_nearest_rotation(matrix)
    assert torch.allclose(found @ found.T, torch.eye(rank, dtype=torch.float64), atol=1e-9)
    assert torch.isclose(torch.linalg.det(found), torch.ones((), dtype=torch.float64))
    for _ in range(20):
        other = torch.linalg.qr(_randn(rng, rank, rank))[0]
        other[:, 0] *= torch.linalg.det(other)
        assert (found * matrix).sum() >= (other * matrix).sum() - 1e-9
        # and close by: along the geodesics through the found one, a stationary point
        skew = 1e-3 * (_randn(rng, rank, rank) - _randn(rng, rank, rank).T)
        near = found @ torch.linalg.matrix_exp(skew - skew.T)
        assert (found * matrix).sum() >= (near * matrix).sum() - 1e-12
    assert torch.equal(find_nearest_rotation(torch.eye(rank)), torch.eye(rank, dtype=torch.float64))


@few
@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 1000))
def test_procrustes_is_the_nearest_rotation(rank: int, columns: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    source, target = _randn(rng, rank, columns), _randn(rng, rank, columns)
    S = solve_procrustes(source, target)
    assert torch.allclose(S @ S.T, torch.eye(rank, dtype=torch.float64), rtol=0, atol=1e-9)
    best = (S @ source - target).norm()
    # ||S X - T||^2 = ||X||^2 + ||T||^2 - 2 tr(S X T^T), at most by the nuclear norm of T X^T.
    nuclear = torch.linalg.svdvals(target @ source.T).sum()
    expected = (source.square().sum() + target.square().sum() - 2 * nuclear).clamp_min(0.0).sqrt()
    assert abs(float(best - expected)) < 1e-6
    for _ in range(4):
        assert best <= (_orthonormal_rows(rng, rank, rank) @ source - target).norm() + 1e-9


@few
@given(st.integers(1, 4), st.integers(0, 1000))
def test_procrustes_undoes_a_rotation(rank: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    target = _randn(rng, rank, 7)
    source = _orthonormal_rows(rng, rank, rank) @ target
    assert torch.allclose(solve_procrustes(source, target) @ source, target, rtol=0, atol=1e-9)


@few
@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 1000))
def test_with_more_rows_procrustes_has_the_greatest_inner_product(rank: int, more: int, seed: int) -> None:
    """For R' > R (FLoRG's normal case) S has orthonormal rows and maximizes <S source, target>."""
    rng = torch.Generator().manual_seed(seed)
    source, target = _randn(rng, rank + more, 9), _randn(rng, rank, 9)
    S = solve_procrustes(source, target)
    assert S.shape == (rank, rank + more)
    assert torch.allclose(S @ S.T, torch.eye(rank, dtype=torch.float64), rtol=0, atol=1e-9)
    best = ((S @ source) * target).sum()
    assert torch.isclose(best, torch.linalg.svdvals(target @ source.T).sum(), rtol=1e-9)
    for _ in range(4):
        assert best >= ((_orthonormal_rows(rng, rank, rank + more) @ source) * target).sum()


def test_with_more_rows_the_distance_is_not_the_least() -> None:
    """``||S X||`` then depends on S, so the docstring's minimum of ``||S source - target||`` holds for R' = R alone."""
    rng = torch.Generator().manual_seed(0)
    source, target = _randn(rng, 4, 6), _randn(rng, 2, 6)
    distance = (solve_procrustes(source, target) @ source - target).norm()
    others = [(_orthonormal_rows(rng, 2, 4) @ source - target).norm() for _ in range(50)]
    assert min(others) < distance


def _views(rng: torch.Generator, joint: Tensor, count: int, individual: float) -> list[Tensor]:
    """Views with a common column space, and directions and column means of their own."""
    rows, rank = joint.shape
    return [
        joint @ _randn(rng, rank, 5) * 3 + individual * _randn(rng, rows, 2) @ _randn(rng, 2, 5) + _randn(rng, 1, 5)
        for _ in range(count)
    ]


def _joint(rng: torch.Generator, rows: int, rank: int) -> Tensor:
    columns = _randn(rng, rows, rank)
    return torch.linalg.qr(columns - columns.mean(0))[0]


@few
@given(st.integers(1, 3), st.integers(0, 1000))
def test_ajive_finds_a_common_space_exactly(rank: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    joint = _joint(rng, 20, rank)
    U = compute_ajive(_views(rng, joint, 4, individual=1.0), rank).basis
    assert U.dtype == torch.float64
    assert torch.allclose(U @ U.T, joint @ joint.T, rtol=0, atol=1e-9)


def _by_definition(
    views: list[Tensor], joint_rank: int, view_rank: int, identifiable: bool
) -> tuple[list[Tensor], list[float]]:
    """J_i and tau_i, from dense projections: center, top directions of each view, top of their sum, check, project."""
    size, centered, taus = len(views[0]), [], []
    total = torch.zeros(size, size, dtype=torch.float64)
    for view in views:
        X = view - torch.ones(size, 1, dtype=torch.float64) @ view.mean(0, keepdim=True)
        vectors = torch.linalg.eigh(X @ X.T)[1][:, -view_rank:]
        total += vectors @ vectors.T
        values = [*torch.linalg.svdvals(X).tolist(), 0.0]
        taus.append((values[view_rank - 1] + values[view_rank]) / 2)
        centered.append(X)
    top = torch.linalg.eigh(total)[1][:, -joint_rank:]
    if identifiable:
        keep = [all(float((X.T @ u).norm()) >= tau for X, tau in zip(centered, taus, strict=True)) for u in top.T]
        top = top[:, keep]
    return [top @ top.T @ X for X in centered], taus


@few
@given(st.integers(1, 3), st.integers(1, 4), st.booleans(), st.integers(0, 1000))
def test_ajive_is_its_definition_step_by_step(joint_rank: int, view_rank: int, identifiable: bool, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    views = [_randn(rng, 9, columns) + 2 for columns in (5, 6, 4)]
    found = compute_ajive(views, joint_rank, view_rank, identifiable=identifiable)
    joint, thresholds = _by_definition(views, joint_rank, view_rank, identifiable)
    assert found.thresholds == pytest.approx(thresholds, rel=1e-9)
    for number, expected in enumerate(joint):
        assert torch.allclose(found.compute_joint(number), expected, rtol=0, atol=1e-8)
    if found.basis.numel():
        assert (found.basis.gather(0, found.basis.abs().argmax(0)[None]) > 0).all()


@few
@given(
    st.sampled_from(["shared", "different", "any factors"]),
    st.sampled_from([1, 2, 3, None]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 1000),
)
def test_views_given_as_factors_are_their_dense_matrices(
    kind: str, joint_rank: int | None, center: bool, identifiable: bool, seed: int
) -> None:
    """With one shared projector, with one each, and with factors that are not orthonormal: every output, given and
    estimated ranks alike. The same draws serve both."""
    rng = torch.Generator().manual_seed(seed)
    shared = torch.linalg.qr(_randn(rng, 8, 4))[0].T
    common = _randn(rng, 12, 2)
    pairs: list[LowRank] = []
    for _ in range(3):
        left = torch.cat([4 * common, _randn(rng, 12, 2)], 1) @ _randn(rng, 4, 4)
        right = torch.linalg.qr(_randn(rng, 8, 4))[0].T if kind == "different" else shared
        pairs.append(LowRank(left, _randn(rng, 4, 8) if kind == "any factors" else right, 0.5))
    dense = [pair.to_dense() for pair in pairs]
    options = {"center": center, "identifiable": identifiable, "samples": 20}
    one = compute_ajive(pairs, joint_rank, 3, **options, rng=torch.Generator().manual_seed(1))
    other = compute_ajive(dense, joint_rank, 3, **options, rng=torch.Generator().manual_seed(1))
    assert one.basis.shape == other.basis.shape
    assert torch.allclose(one.basis @ one.basis.T, other.basis @ other.basis.T, rtol=0, atol=1e-7)
    for number, (view, matrix) in enumerate(zip(one.views, dense, strict=True)):
        assert abs(one.thresholds[number] - other.thresholds[number]) < 1e-9
        assert torch.allclose(lift(view, view.left), matrix, rtol=0, atol=1e-9)
        assert torch.allclose(lift(view, one.compute_joint(number)), other.compute_joint(number), rtol=0, atol=1e-6)
        assert torch.allclose(
            lift(view, compute_individual(one, number)), compute_individual(other, number), rtol=0, atol=1e-6
        )
        assert torch.allclose(lift(view, one.means[number]), other.means[number], rtol=0, atol=1e-9)


@pytest.mark.parametrize("noise", [0.02, pytest.param(0.1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_the_two_bounds_find_the_joint_rank(rank: int, noise: float) -> None:
    """Planted: ``rank`` common directions and two of each view's own, under noise."""
    rng = torch.Generator().manual_seed(rank)
    joint = _joint(rng, 60, max(1, rank))[:, :rank]
    views = [
        joint @ _randn(rng, rank, 40) + _joint(rng, 60, 2) @ _randn(rng, 2, 40) + noise * _randn(rng, 60, 40) / 8
        for _ in range(4)
    ]
    found = compute_ajive(views, None, rank + 2, samples=200, rng=torch.Generator().manual_seed(2))
    assert found.basis.shape == (60, rank)
    assert (found.basis.T @ joint).square().sum() > 0.95 * rank - 1e-9


def test_views_without_a_rest_share_nothing_unless_a_rank_is_given() -> None:
    """Noise 0 makes Wedin's bound K, which nothing exceeds: why a view rank below the views' own is needed."""
    rng = torch.Generator().manual_seed(0)
    views = [_randn(rng, 12, 3).square() for _ in range(4)]
    assert compute_ajive(views, None, 3, samples=50).basis.shape[1] == 0
    assert compute_ajive(views, 3, 3).basis.shape[1] == 3


def test_draws_without_a_generator_are_those_of_seed_0() -> None:
    """Two seeds find different joint ranks of these views, from one draw for each bound."""
    rng = torch.Generator().manual_seed(1)
    joint = torch.linalg.qr(_randn(rng, 12, 2))[0]
    views = [joint @ _randn(rng, 2, 6) + 1.5 * _randn(rng, 12, 6) for _ in range(3)]
    seeded = [compute_ajive(views, None, 3, samples=1, rng=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    assert [found.basis.shape[1] for found in seeded] == [0, 1]
    assert compute_ajive(views, None, 3, samples=1).basis.shape[1] == 0


def test_joint_and_individual_parts_and_the_rest_make_up_the_view_in_any_order() -> None:
    rng = torch.Generator().manual_seed(6)
    joint = _joint(rng, 20, 2)
    views = _views(rng, joint, 3, individual=1.0)
    found = compute_ajive(views, 2, 4)
    for number, view in enumerate(views):
        rest = view - view.mean(0) - found.compute_joint(number) - compute_individual(found, number)
        assert torch.linalg.matrix_norm(rest, 2) <= found.thresholds[number]
        assert (joint.T @ compute_individual(found, number)).norm() < 1e-9
        assert torch.linalg.matrix_rank(compute_individual(found, number)) == 2
    rng = torch.Generator().manual_seed(5)
    views = [_randn(rng, 8, 3) for _ in range(4)]
    one, other = compute_ajive(views, 2).basis, compute_ajive(views[::-1], 2).basis
    assert torch.allclose(one @ one.T, other @ other.T, rtol=0, atol=1e-9)


def test_directions_without_variation_have_no_vote() -> None:
    """Views of rank 1 written in 2 columns are views of rank 1; a view of zeros has none."""
    rng = torch.Generator().manual_seed(0)
    shared = _joint(rng, 8, 1)
    views = [(shared + 0.6 * _randn(rng, 8, 1)) @ _randn(rng, 1, 2) for _ in range(4)]
    given_rank, default = compute_ajive(views, 1, view_rank=1).basis, compute_ajive(views, 1).basis
    assert torch.allclose(default @ default.T, given_rank @ given_rank.T, rtol=0, atol=1e-9)
    silent = compute_ajive([*views, torch.zeros(8, 2)], 1).basis
    assert torch.allclose(silent @ silent.T, default @ default.T, rtol=0, atol=1e-9)
    assert compute_ajive([*views, torch.zeros(8, 2)], 1).thresholds[-1] == 0.0
    nothing = compute_ajive([torch.zeros(8, 2)] * 2, 2, identifiable=True)
    assert nothing.basis.shape == (8, 0)
    assert not nothing.compute_joint(0).any()
