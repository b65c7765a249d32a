"""Joined second moments against dense matrices; every rule on real updates: tests/methods/test_fedgalore.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedspan.core.alignment import compute_ajive
from fedspan.core.second_moments import MomentSynchronizer, compute_covering_projector
from helpers.ajive_parts import lift

WEIGHTS = [0.2, 0.3, 0.5]


def synchronizer(rule: Any, joint_rank: int = 2) -> MomentSynchronizer:
    return MomentSynchronizer(
        rule=rule, joint_rank=joint_rank, estimate_joint_rank=False, view_rank=3, identifiable=False
    )


def random_clients() -> tuple[list[Tensor], list[Tensor], torch.Generator]:
    """Moments (9, 3) and projectors (3, 7) of three clients."""
    rng = torch.Generator().manual_seed(3)
    moments = [torch.rand(9, 3, generator=rng, dtype=torch.float64) for _ in WEIGHTS]
    drawn = [torch.randn(7, 3, generator=rng, dtype=torch.float64) for _ in WEIGHTS]
    return moments, [torch.linalg.qr(matrix)[0].T for matrix in drawn], rng


def mean(matrices: list[Tensor]) -> Tensor:
    return torch.stack([weight * matrix for weight, matrix in zip(WEIGHTS, matrices, strict=True)]).sum(0)


def nearest(matrix: Tensor, rank: int) -> Tensor:
    U, S, Vt = torch.linalg.svd(matrix, full_matrices=False)
    return (U[:, :rank] * S[:rank]) @ Vt[:rank]


def test_moments_of_one_basis_are_joined_by_each_rule() -> None:
    moments, _, rng = random_clients()
    found = compute_ajive(moments, 2, 3)
    parts = [found.compute_joint(number) + shift for number, shift in enumerate(found.means)]
    expected = {"average": mean(moments), "average-svd": nearest(mean(moments), 2), "ajive": mean(parts)}
    for rule, matrix in expected.items():
        v = synchronizer(rule).join(moments, WEIGHTS, rng)
        torch.testing.assert_close(v, matrix.clamp_min(0.0), rtol=1e-9, atol=1e-12)
        assert (v >= 0).all()


def test_linear_moments_of_own_projectors_are_joined_as_the_dense_matrices_are() -> None:
    moments, projectors, rng = random_clients()
    views = [v @ P for v, P in zip(moments, projectors, strict=True)]
    found = compute_ajive(views, 3, 3)
    parts = [lift(found.views[n], found.compute_joint(n)) + view.mean(0) for n, view in enumerate(views)]
    for rule, matrix in {"average": mean(views), "ajive": mean(parts)}.items():
        v, P = synchronizer(rule, 3).join_projected(moments, projectors, WEIGHTS, rng, linear=True)
        torch.testing.assert_close(v @ P, nearest(matrix, 3), rtol=1e-9, atol=1e-12)


def test_moments_of_one_projector_stay_as_they_are_under_squared_entries() -> None:
    moments, projectors, rng = random_clients()
    shared = [projectors[0]] * len(moments)
    v, P = synchronizer("average").join_projected(moments, shared, WEIGHTS, rng, linear=False)
    squares = (shared[0] @ P.T).square()
    torch.testing.assert_close(v, mean(moments) @ squares, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(P.T @ P, shared[0].T @ shared[0], rtol=1e-9, atol=1e-12)


def test_the_covering_projector_captures_more_of_the_projectors_than_any_of_them() -> None:
    _, projectors, _ = random_clients()

    def captured(P: Tensor) -> float:
        return sum(w * float((own @ P.T).square().sum()) for w, own in zip(WEIGHTS, projectors, strict=True))

    best = compute_covering_projector(projectors, WEIGHTS)
    torch.testing.assert_close(best @ best.T, torch.eye(3, dtype=torch.float64))
    assert all(captured(best) >= captured(P) for P in projectors)
