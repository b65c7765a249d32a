"""Structured bases against the matrix that they stand for, written out entry by entry."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedspan.core.bases import draw_dense_bases, draw_mixing_keys, multiply_by_mixing
from fedspan.core.parametrization import MixedGram

few = settings(max_examples=25, deadline=None)


def written_out(longer: int, shorter: int, seed: int) -> Tensor:
    """M (K, N): sign_j c_j cos(pi j (4 place_i + 1) / 2 N), with c_0 = sqrt(1 / N) and c_j = sqrt(2 / N)."""
    places, signs = draw_mixing_keys(longer, shorter, seed, "layer")
    rows = [
        [
            float(signs[j])
            * math.sqrt((2 if j else 1) / longer)
            * math.cos(math.pi * j * (4 * place + 1) / (2 * longer))
            for j in range(longer)
        ]
        for place in places.tolist()
    ]
    return torch.tensor(rows, dtype=torch.float64)


@few
@given(st.integers(1, 12), st.integers(0, 12), st.integers(1, 4), st.integers(0, 1000))
def test_the_fast_product_is_that_with_an_orthonormal_matrix(shorter: int, more: int, rank: int, seed: int) -> None:
    longer = shorter + more
    M = written_out(longer, shorter, seed)
    assert (M @ M.T - torch.eye(shorter, dtype=torch.float64)).abs().max() < 1e-12
    A = torch.randn(rank, shorter, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    places, signs = draw_mixing_keys(longer, shorter, seed, "layer")
    assert (multiply_by_mixing(A, places, signs) - A @ M).abs().max() < 1e-12 * (1 + float(A.abs().max()))


def test_gradients_and_batches_pass_through() -> None:
    M = written_out(7, 5, 1)
    keys = draw_mixing_keys(7, 5, 1, "layer")
    A = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    out = multiply_by_mixing(A, *keys)
    assert torch.allclose(out, A @ M, atol=1e-12)
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    assert A.grad is not None
    assert torch.allclose(A.grad, weights @ M.T, atol=1e-12)


def test_every_direction_of_the_longer_side_is_reached_alike() -> None:
    """A basis that chose K of N inputs would leave the others out; here each has K / N of its weight, give or take."""
    M = written_out(400, 100, 0)
    reached = M.square().sum(0)
    assert 0.1 < float(reached.min()) < float(reached.max()) < 0.5
    assert float(M.abs().max()) <= math.sqrt(2 / 400) + 1e-12


@pytest.mark.parametrize(("shape", "side"), [((6, 9), "right"), ((9, 6), "left"), ((6, 6), "right")])
def test_mixed_gram_is_gram_under_the_identity_and_the_mixing(shape: tuple[int, int], side: str) -> None:
    longer, shorter = max(shape), min(shape)
    M, (places, signs) = written_out(longer, shorter, 5), draw_mixing_keys(longer, shorter, 5, "layer")
    A = torch.randn(2, shorter, dtype=torch.float64)
    pair = MixedGram(0.5, side).compute_effective({"A": A, "places": places, "signs": signs}).pair
    assert pair is not None
    L, R = (torch.eye(shorter).double(), M) if side == "right" else (M.T, torch.eye(shorter).double())
    assert torch.allclose(pair.to_dense(), 0.5 * L @ A.T @ A @ R, atol=1e-12)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (6, 6)])
def test_dense_bases_are_orthonormal_and_the_same_for_every_holder_of_the_key(shape: tuple[int, int]) -> None:
    L, R = draw_dense_bases(shape, 3, "layer")
    draw_dense_bases.cache_clear()
    again = draw_dense_bases(shape, 3, "layer")
    assert torch.equal(L, again[0])
    assert torch.equal(R, again[1])
    assert not torch.equal(L, draw_dense_bases(shape, 4, "layer")[0])
    k = min(shape)
    assert (L.shape, R.shape) == ((shape[0], k), (k, shape[1]))
    for gram in (L.T @ L, R @ R.T):
        assert (gram - torch.eye(k)).abs().max() < 1e-6
