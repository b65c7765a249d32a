"""Procrustes against random rotations; AJIVE against its definition on dense views."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedspan.core.alignment import ajive_joint_basis, nearest_rotation, procrustes

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
    found = nearest_rotation(matrix)
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
    assert torch.equal(nearest_rotation(torch.eye(rank)), torch.eye(rank, dtype=torch.float64))


@few
@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 1000))
def test_procrustes_is_the_nearest_rotation(rank: int, columns: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    source, target = _randn(rng, rank, columns), _randn(rng, rank, columns)
    S = procrustes(source, target)
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
    assert torch.allclose(procrustes(source, target) @ source, target, rtol=0, atol=1e-9)


@few
@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 1000))
def test_with_more_rows_procrustes_has_the_greatest_inner_product(rank: int, more: int, seed: int) -> None:
    """For R' > R (FLoRG's normal case) S has orthonormal rows and maximises <S source, target>."""
    rng = torch.Generator().manual_seed(seed)
    source, target = _randn(rng, rank + more, 9), _randn(rng, rank, 9)
    S = procrustes(source, target)
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
    distance = (procrustes(source, target) @ source - target).norm()
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
    U = ajive_joint_basis(_views(rng, joint, 4, individual=1.0), rank)
    assert U.dtype == torch.float64
    assert torch.allclose(U @ U.T, joint @ joint.T, rtol=0, atol=1e-9)


def test_ajive_is_its_definition_step_by_step() -> None:
    """Centre, top singular vectors of each view, SVD of their concatenation; here through sums of projections."""
    rng = torch.Generator().manual_seed(3)
    views = [_randn(rng, 8, columns) + 2 for columns in (5, 6, 4)]
    U = ajive_joint_basis(views, joint_rank=2, view_rank=3)
    total = torch.zeros(8, 8, dtype=torch.float64)
    for view in views:
        centred = view - torch.ones(8, 1, dtype=torch.float64) @ view.mean(0, keepdim=True)
        vectors = torch.linalg.eigh(centred @ centred.T)[1][:, -3:]
        total += vectors @ vectors.T
    top = torch.linalg.eigh(total)[1][:, -2:]
    assert torch.allclose(U @ U.T, top @ top.T, rtol=0, atol=1e-9)
    assert (U.gather(0, U.abs().argmax(0)[None]) > 0).all()


def test_ajive_in_projected_coordinates_is_ajive_on_the_dense_views() -> None:
    """FedGaLore's shortcut: with orthonormal R the basis of {v_i R^T} is that of {v_i}."""
    rng = torch.Generator().manual_seed(4)
    views = [_randn(rng, 9, 3).square() for _ in range(4)]
    R = torch.linalg.qr(_randn(rng, 7, 3))[0]
    small = ajive_joint_basis(views, 3)
    dense = ajive_joint_basis([view @ R.T for view in views], 3, view_rank=3)
    assert torch.allclose(small @ small.T, dense @ dense.T, rtol=0, atol=1e-9)


def test_ajive_does_not_depend_on_the_order_of_views() -> None:
    rng = torch.Generator().manual_seed(5)
    views = [_randn(rng, 8, 3) for _ in range(4)]
    one, other = ajive_joint_basis(views, 2), ajive_joint_basis(views[::-1], 2)
    assert torch.allclose(one @ one.T, other @ other.T, rtol=0, atol=1e-9)


def test_directions_without_variation_have_no_vote() -> None:
    """Views of rank 1 written in 2 columns are views of rank 1."""
    rng = torch.Generator().manual_seed(0)
    shared = _joint(rng, 8, 1)
    views = [(shared + 0.6 * _randn(rng, 8, 1)) @ _randn(rng, 1, 2) for _ in range(4)]
    given_rank, default = ajive_joint_basis(views, 1, view_rank=1), ajive_joint_basis(views, 1)
    assert torch.allclose(default @ default.T, given_rank @ given_rank.T, rtol=0, atol=1e-9)
