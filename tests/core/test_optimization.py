"""Penalties, moments, smoothing and second moments against their definitions."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.ndimage import convolve1d
from torch import Tensor

from fedspan.core.alignment import compute_ajive
from fedspan.core.parametrization import Projected
from fedspan.core.penalties import Proximal, SlotProduct
from fedspan.core.projectors import draw_random_projector
from fedspan.core.second_moments import MomentSynchronizer, compute_covering_projector
from fedspan.core.smoothing import smooth, smooth_groups
from fedspan.core.values import Group
from helpers.ajive_parts import lift


def test_slot_product_is_the_product_of_the_last_slots_norms() -> None:
    rng = torch.Generator().manual_seed(0)
    tensors = {
        "one/A": torch.randn((3, 4), generator=rng),
        "one/B": torch.randn((5, 3), generator=rng),
        "two/A": torch.randn((3, 2), generator=rng),
        "two/B": torch.randn((6, 3), generator=rng),
    }
    expected = 0.0
    for layer in ("one", "two"):
        last_A = sum(float(value) ** 2 for value in tensors[f"{layer}/A"][1:].flatten()) ** 0.5
        last_B = sum(float(value) ** 2 for value in tensors[f"{layer}/B"][:, 1:].flatten()) ** 0.5
        expected += 0.5 * last_A * last_B
    assert abs(float(SlotProduct(0.5, 1, ("one", "two")).compute_value(tensors)) - expected) < 1e-5


def test_slot_product_has_no_gradient_by_a_factor_that_is_zero_and_its_norm_by_none() -> None:
    """B = 0 at the start: the subgradient 0 by B, and A's gradient is 0 because it is weighted by ||B||. No NaN."""
    A, B = torch.ones((3, 4), requires_grad=True), torch.zeros((5, 3), requires_grad=True)
    SlotProduct(1.0, 1, ("one",)).compute_value({"one/A": A, "one/B": B}).backward()
    assert not A.grad.any()
    assert not B.grad.any()


def test_slot_product_pulls_both_factors_and_no_earlier_slot() -> None:
    """By hand: lambda ||A_g|| B_g / ||B_g||, and likewise by A; on tensors without a graph it would be none."""
    rng = torch.Generator().manual_seed(1)
    A = torch.randn((3, 4), generator=rng).requires_grad_()
    B = torch.randn((5, 3), generator=rng).requires_grad_()
    SlotProduct(0.5, 1, ("one",)).compute_value({"one/A": A, "one/B": B}).backward()
    a, b = A.detach()[1:], B.detach()[:, 1:]
    assert torch.allclose(A.grad[1:], 0.5 * b.norm() * a / a.norm(), rtol=1e-5)
    assert torch.allclose(B.grad[:, 1:], 0.5 * a.norm() * b / b.norm(), rtol=1e-5)
    assert not A.grad[0].any()
    assert not B.grad[:, 0].any()


@pytest.mark.parametrize("side", ["right", "left"])
def test_proximal_holds_the_sum_of_a_projected_layer_s_segments(side: str) -> None:
    """Its value and its gradient by acc are those of the dense change, of which acc sees the projected part."""
    rng = torch.Generator().manual_seed(1)
    one, shape, rank = Projected(side), (7, 5) if side == "right" else (5, 7), 2
    P = draw_random_projector(shape, rank, side, rng).double()
    acc = torch.randn((7, rank) if side == "right" else (rank, 7), generator=rng, dtype=torch.float64)
    done = {slot: torch.randn(size, generator=rng, dtype=torch.float64) for slot, size in _segments(shape, rank)}
    penalty = Proximal(0.7, {"one/acc": torch.zeros_like(acc)}, {"one": one})
    acc.requires_grad_()
    tensors = {"one/acc": acc, "one/P": P}
    assert torch.allclose(penalty.compute_value(tensors), 0.35 * one.pair(acc, P).to_dense().square().sum())
    dense = one.pair(acc, P).to_dense() + done["done_B"] @ done["done_A"]
    value = penalty.compute_value({**tensors, **{f"one/{slot}": tensor for slot, tensor in done.items()}})
    assert torch.allclose(value, 0.35 * dense.square().sum())
    (gradient,) = torch.autograd.grad(value, acc)
    assert torch.allclose(gradient, 0.7 * (dense @ P.T if side == "right" else P.T @ dense))


def _segments(shape: tuple[int, int], rank: int) -> list[tuple[str, tuple[int, int]]]:
    return [("done_B", (shape[0], 2 * rank)), ("done_A", (2 * rank, shape[1]))]


@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (1, 4), (2, 5, 6), (4, 2)])
@pytest.mark.parametrize("axis", [0, 1])
def test_it_is_scipy_s_mirrored_convolution(shape: tuple[int, ...], axis: int) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = convolve1d(values.numpy(), np.array([1, 4, 6, 4, 1]) / 16, axis=axis, mode="reflect")
    torch.testing.assert_close(smooth(values, axis), torch.from_numpy(expected), rtol=1e-12, atol=1e-14)


def test_a_constant_does_not_change_and_an_alternating_sign_vanishes() -> None:
    signs = torch.tensor([1.0, -1.0] * 4)[None].expand(2, -1)
    assert torch.equal(smooth(torch.ones(2, 8), 1), torch.ones(2, 8))
    assert not smooth(signs, 1)[:, 2:-2].any()


def test_groups_are_smoothed_along_their_own_axis_and_others_are_not() -> None:
    values = torch.arange(12.0).square().view(3, 4)
    groups = (Group(("l/A",), smoothed_axis=1), Group(("l/B",), smoothed_axis=0), Group(("extras/w",)))
    smoothed = smooth_groups(groups, {"l/A": values, "l/B": values, "extras/w": values})
    assert torch.equal(smoothed["l/A"], smooth(values, 1))
    assert torch.equal(smoothed["l/B"], smooth(values, 0))
    assert smoothed["extras/w"] is values


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
