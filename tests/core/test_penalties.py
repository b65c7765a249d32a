"""Penalties against their definitions, and their gradients where a norm vanishes."""

from __future__ import annotations

import pytest
import torch

from fedspan.core.parametrization import Projected
from fedspan.core.penalties import Proximal, SlotProduct
from fedspan.core.projectors import draw_random_projector


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
    assert A.grad is not None
    assert B.grad is not None
    assert not A.grad.any()
    assert not B.grad.any()


def test_slot_product_pulls_both_factors_and_no_earlier_slot() -> None:
    """By hand: lambda ||A_g|| B_g / ||B_g||, and likewise by A; on tensors without a graph it would be none."""
    rng = torch.Generator().manual_seed(1)
    A = torch.randn((3, 4), generator=rng).requires_grad_()
    B = torch.randn((5, 3), generator=rng).requires_grad_()
    SlotProduct(0.5, 1, ("one",)).compute_value({"one/A": A, "one/B": B}).backward()
    a, b = A.detach()[1:], B.detach()[:, 1:]
    assert A.grad is not None
    assert B.grad is not None
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
