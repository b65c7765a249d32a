"""Projectors against dense singular vectors, and moments carried through the dense matrix that they stand for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fedspan.core.lowrank import LowRank
from fedspan.core.projectors import (
    choose_side,
    compute_sketched_projector,
    compute_svd_projector,
    draw_random_projector,
    reproject,
)
from fedspan.core.tensors import create_generator

SIDES = ("right", "left")
few = settings(max_examples=25, deadline=None)


def _projection(P: Tensor, side: str) -> Tensor:
    """The orthogonal projection of the side's space onto the directions of P."""
    P = P.double()
    return P.T @ P if side == "right" else P @ P.T


def test_the_shorter_side_is_projected_and_square_counts_as_tall() -> None:
    assert choose_side((8, 5)) == "right"
    assert choose_side((5, 8)) == "left"
    assert choose_side((6, 6)) == "right"


def _gradient(rows: int, columns: int, tokens: int, seed: int) -> LowRank:
    """dY^T X, some of whose rows may be linear combinations of others."""
    rng = torch.Generator().manual_seed(seed)
    return LowRank(torch.randn((rows, tokens), generator=rng), torch.randn((tokens, columns), generator=rng))


@few
@given(
    st.integers(2, 9), st.integers(2, 9), st.integers(1, 12), st.sampled_from(SIDES), st.integers(0, 1000), st.data()
)
@pytest.mark.parametrize("rule", ["svd", "rsvd"])
def test_projectors_of_a_gradient_keep_most_of_it(
    rule: str, rows: int, columns: int, tokens: int, side: str, seed: int, data: st.DataObject
) -> None:
    """As much as any r directions can, whichever form is cheaper; also with fewer tokens than directions asked for.

    So small a gradient has no more directions than the sketch has columns, so the sketch is exact.
    """
    rank = data.draw(st.integers(1, min(rows, columns)))
    factors = _gradient(rows, columns, tokens, seed)
    rng = torch.Generator().manual_seed(seed)
    P = (
        compute_svd_projector(factors, rank, side)
        if rule == "svd"
        else compute_sketched_projector(factors, rank, side, rng)
    )
    G = factors.to_dense().double()
    gram = P @ P.T if side == "right" else P.T @ P
    assert (gram - torch.eye(rank)).abs().max() < 1e-5
    assert P.shape == ((rank, columns) if side == "right" else (rows, rank))
    kept = G @ _projection(P, side) if side == "right" else _projection(P, side) @ G
    best = torch.linalg.svdvals(G)[rank:].norm()
    assert abs(float((G - kept).norm() - best)) < 1e-5 * float(G.norm())


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("tokens", [10, 2000])
def test_a_sketch_of_a_large_gradient_is_nearly_the_best(side: str, tokens: int) -> None:
    """Singular values that fall like 1 / k, through the factors (10 tokens) and after forming (2000)."""
    rng = torch.Generator().manual_seed(1)
    U, V = (torch.linalg.qr(torch.randn(size, 40, generator=rng))[0] for size in (90, 70))
    B = U / torch.arange(1, 41)
    mix = torch.linalg.qr(torch.randn(tokens, 40, generator=rng))[0].T if tokens > 40 else torch.eye(40)
    gradient = LowRank(B @ mix, mix.T @ V.T) if tokens > 40 else LowRank(B[:, :tokens], V.T[:tokens])
    G = gradient.to_dense().double()
    P = compute_sketched_projector(gradient, 4, side, torch.Generator().manual_seed(2))
    kept = G @ _projection(P, side) if side == "right" else _projection(P, side) @ G
    assert (G - kept).norm() < 1.01 * torch.linalg.svdvals(G)[4:].norm()
    again = compute_sketched_projector(gradient, 4, side, torch.Generator().manual_seed(2))
    assert torch.equal(P, again)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("tokens", [20, 30])
def test_a_sketch_multiplies_by_factors_or_the_gradient_whichever_is_cheaper(side: str, tokens: int) -> None:
    """6 products with 2 + 8 columns: through the factors up to 24 tokens."""
    with FlopCounterMode(display=False) as counter:
        compute_sketched_projector(_gradient(40, 30, tokens, 0), 2, side, torch.Generator().manual_seed(0))
    through, formed = 6 * 10 * tokens * (40 + 30), tokens * 40 * 30 + 6 * 10 * 40 * 30
    last = 10 * 10 * (40 if side == "left" else 30)  # of the small SVD's left vectors
    assert counter.get_total_flops() == 2 * (min(through, formed) + last)


@pytest.mark.parametrize("side", SIDES)
def test_a_gradient_of_zeros_still_gives_a_projector(side: str) -> None:
    zero = LowRank(torch.zeros(6, 3), torch.randn(3, 5))
    for P in (compute_svd_projector(zero, 2, side), compute_sketched_projector(zero, 2, side, torch.Generator())):
        gram = P @ P.T if side == "right" else P.T @ P
        assert (gram - torch.eye(2)).abs().max() < 1e-6


@few
@given(st.integers(1, 8), st.integers(1, 8), st.sampled_from(SIDES), st.integers(0, 1000), st.data())
def test_random_projector_is_orthonormal_and_keyed(rows: int, columns: int, side: str, seed: int, data: st.DataObject):
    size = columns if side == "right" else rows
    rank = data.draw(st.integers(1, size))
    P = draw_random_projector((rows, columns), rank, side, create_generator(seed, "projector", "layer"))
    gram = P @ P.T if side == "right" else P.T @ P
    assert gram.shape == (rank, rank)
    assert (gram - torch.eye(rank)).abs().max() < 1e-6
    again = draw_random_projector((rows, columns), rank, side, create_generator(seed, "projector", "layer"))
    assert torch.equal(P, again)


def test_random_projectors_favor_no_direction() -> None:
    """Haar: the mean projection over many draws is rank / size times the identity."""
    total = torch.zeros(4, 4, dtype=torch.float64)
    for seed in range(200):
        total += _projection(draw_random_projector((9, 4), 2, "right", create_generator(seed, "haar")), "right")
    # An entry's standard deviation is below 0.25: 5 standard errors of 200 draws.
    assert (total / 200 - 0.5 * torch.eye(4)).abs().max() < 5 * 0.25 / 200**0.5


def _bases(side: str) -> tuple[Tensor, Tensor]:
    """Two projectors of rank 2 whose change of coordinates has negative entries."""
    old, new = (draw_random_projector((6, 5), 2, side, create_generator(seed, "basis")).double() for seed in (3, 1))
    return old, new


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("second", [False, True])
def test_linear_is_the_dense_moment_seen_in_new_coordinates(side: str, second: bool) -> None:
    old, new = _bases(side)
    shape = (6, 2) if side == "right" else (2, 5)
    moment = torch.rand(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    dense = moment @ old if side == "right" else old @ moment
    expected = dense @ new.T if side == "right" else new.T @ dense
    assert expected.min() < 0  # so the clamp below is put to the test
    if second:
        expected = expected.clamp_min(0.0)
    assert torch.allclose(reproject(moment, old, new, side, "linear", second), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("side", SIDES)
def test_squared_maps_variances(side: str) -> None:
    """The second moment of independent coordinates under T: v'_j = sum_k T_kj^2 v_k. The first moment is linear."""
    old, new = _bases(side)
    T = old @ new.T if side == "right" else old.T @ new
    moment = torch.rand((6, 2) if side == "right" else (2, 5), dtype=torch.float64)
    rows = moment if side == "right" else moment.T
    expected = torch.zeros_like(rows)
    for i in range(rows.shape[0]):
        for j in range(2):
            expected[i, j] = sum(T[k, j] ** 2 * rows[i, k] for k in range(2))
    moved = reproject(moment, old, new, side, "squared", second=True)
    assert torch.allclose(moved if side == "right" else moved.T, expected, rtol=0, atol=1e-12)
    assert (moved >= 0).all()
    first = reproject(moment, old, new, side, "squared", second=False)
    assert torch.equal(first, reproject(moment, old, new, side, "linear", second=False))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("rule", ["keep", "linear", "squared"])
def test_the_same_projector_changes_nothing(side: str, rule: str) -> None:
    old, _ = _bases(side)
    old = torch.linalg.qr(old.T if side == "right" else old)[0]  # orthonormal to float64
    old = old.T if side == "right" else old
    moment = torch.rand((6, 2) if side == "right" else (2, 5), dtype=torch.float64)
    for second in (False, True):
        assert torch.allclose(reproject(moment, old, old, side, rule, second), moment, rtol=0, atol=1e-12)


@pytest.mark.parametrize("side", SIDES)
def test_keep_and_reset(side: str) -> None:
    old, new = _bases(side)
    moment = torch.rand((6, 2) if side == "right" else (2, 5), dtype=torch.float64)
    assert torch.equal(reproject(moment, old, new, side, "keep", second=True), moment)
    assert not reproject(moment, old, new, side, "reset", second=True).any()


def test_an_unknown_rule_is_refused() -> None:
    old, new = _bases("right")
    with pytest.raises(ValueError, match="sqared"):
        reproject(torch.rand((6, 2), dtype=torch.float64), old, new, "right", "sqared", second=True)
