"""Estimates of a Hessian's norms against the Hessian itself."""

from __future__ import annotations

import torch
from curvature import estimate_largest_magnitude, estimate_norms, make_hessian_product
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F


def network() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    x, y = torch.randn(20, 5), torch.randint(0, 3, (20,))
    return model, F.cross_entropy(model(x), y)


def hessian(model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    """Row by row: the oracle."""
    parameters = list(model.parameters())
    first = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters, create_graph=True)])
    rows = [torch.autograd.grad(one, parameters, retain_graph=True, allow_unused=True) for one in first]
    return torch.stack(
        [
            torch.cat(
                [(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in zip(row, parameters, strict=True)]
            )
            for row in rows
        ]
    )


def test_products_are_the_hessian_s() -> None:
    model, loss = network()
    whole = hessian(model, loss)
    product, size = make_hessian_product(loss, list(model.parameters()))
    assert whole.shape == (size, size)
    vector = torch.randn(size, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(product(vector), whole @ vector, atol=1e-6)


def test_norms_and_stable_rank() -> None:
    model, loss = network()
    whole = hessian(model, loss).double()
    product, size = make_hessian_product(loss, list(model.parameters()))
    found = estimate_norms(product, size, torch.Generator().manual_seed(2), probes=400, iterations=30)
    squared = float((whole**2).sum())
    assert abs(found.frobenius**2 - squared) < 4 * found.error
    assert found.error < 0.1 * squared
    spectral = float(torch.linalg.matrix_norm(whole, 2))
    assert abs(found.spectral - spectral) < 1e-4 * spectral
    assert abs(found.stable_rank - squared / spectral**2) < 0.2 * squared / spectral**2


@given(st.integers(1, 12), st.integers(0, 10**6))
def test_lanczos_is_never_above_and_ends_exact(size: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    half = torch.randn(size, size, generator=draw, dtype=torch.float64)
    matrix, start = half + half.T, torch.randn(size, generator=draw, dtype=torch.float64)
    true = float(torch.linalg.eigvalsh(matrix).abs().max())
    found = [estimate_largest_magnitude(matrix.mv, start, count) for count in range(1, size + 1)]
    assert all(one <= true * (1 + 1e-9) for one in found)
    assert abs(found[-1] - true) <= 1e-6 * true


def test_nothing_curved_has_no_stable_rank() -> None:
    zero = estimate_norms(torch.zeros_like, 7, torch.Generator().manual_seed(0))
    assert (zero.frobenius, zero.spectral) == (0.0, 0.0)
    assert zero.stable_rank != zero.stable_rank
