"""Low-rank algebra, stacks on servers, projectors and moments carried through them, against dense float64 matrices."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fedspan.core import lowrank
from fedspan.core.aggregation import average_stack, choose_smaller_form, compute_residual, map_layers, sum_products
from fedspan.core.projectors import (
    choose_side,
    compute_sketched_projector,
    compute_svd_projector,
    draw_random_projector,
    reproject,
)
from fedspan.core.tensors import create_generator
from fedspan.core.values import Client, LayerSpec, Reduced, StackItem

TOLERANCE = 1e-9
few = settings(max_examples=25, deadline=None)


@st.composite
def low_rank(draw: st.DrawFn, shape: tuple[int, int] | None = None) -> lowrank.LowRank:
    """Pairs of any shape, of ranks beyond min(O, I) and of no rank at all, some zero, some with repeated directions."""
    rows, columns = shape or (draw(st.integers(1, 7)), draw(st.integers(1, 7)))
    rank, kind = draw(st.integers(0, 9)), draw(st.sampled_from(["full", "zero B", "zero A", "repeated"]))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    B = torch.randn((rows, rank), generator=rng, dtype=torch.float64)
    A = torch.randn((rank, columns), generator=rng, dtype=torch.float64)
    if kind == "zero B":
        B.zero_()
    if kind == "zero A":
        A.zero_()
    if kind == "repeated" and rank > 1:
        B[:, 1], A[1] = B[:, 0], A[0]
    return lowrank.LowRank(B, A, draw(st.sampled_from([1.0, 0.25, -3.0, 0.0])))


def _dense(pair: lowrank.LowRank) -> Tensor:
    """The sum of scaled outer products, entry by entry."""
    total = torch.zeros(pair.shape, dtype=torch.float64)
    for k in range(pair.rank):
        total += pair.scale * torch.outer(pair.B[:, k], pair.A[k])
    return total


def _equal(actual: Tensor, expected: Tensor, size: float = 1.0) -> bool:
    return actual.shape == expected.shape and float((actual - expected).norm()) <= TOLERANCE * max(1.0, size)


@few
@given(low_rank())
def test_dense_and_folded(pair: lowrank.LowRank) -> None:
    assert _equal(pair.to_dense(), _dense(pair))
    assert pair.fold_scale().scale == 1.0
    assert _equal(pair.fold_scale().to_dense(), _dense(pair))
    assert pair.numel() == pair.rank * sum(pair.shape)


@few
@given(st.data(), st.integers(1, 6), st.integers(1, 6), st.integers(1, 4))
def test_concatenation_is_the_sum(data: st.DataObject, rows: int, columns: int, count: int) -> None:
    pairs = [data.draw(low_rank((rows, columns))) for _ in range(count)]
    joined = lowrank.concatenate(pairs)
    assert joined.rank == sum(pair.rank for pair in pairs)
    assert _equal(joined.to_dense(), torch.stack([_dense(pair) for pair in pairs]).sum(0), 100.0)


@few
@given(st.data(), st.integers(1, 6), st.integers(1, 6))
def test_inner_product(data: st.DataObject, rows: int, columns: int) -> None:
    left, right = data.draw(low_rank((rows, columns))), data.draw(low_rank((rows, columns)))
    expected = (_dense(left) * _dense(right)).sum()
    assert _equal(
        lowrank.compute_inner_product(left, right), expected, float(_dense(left).norm() * _dense(right).norm())
    )


@few
@given(low_rank(), st.one_of(st.none(), st.integers(1, 8)))
def test_svd(pair: lowrank.LowRank, rank: int | None) -> None:
    matrix = _dense(pair)
    U, S, Vt = lowrank.svd(pair, rank)
    expected = torch.linalg.svdvals(matrix)
    most = min(pair.rank, *pair.shape) if pair.rank < min(pair.shape) else min(pair.shape)
    kept = most if rank is None else min(rank, most)
    assert U.shape == (pair.shape[0], kept)
    assert Vt.shape == (kept, pair.shape[1])
    size = float(matrix.norm())
    assert _equal(S, expected[:kept], size)
    assert _equal(U.T @ U, torch.eye(kept, dtype=torch.float64))
    assert _equal(Vt @ Vt.T, torch.eye(kept, dtype=torch.float64))
    # Eckart-Young: what is left out weighs exactly the singular values that were cut.
    lost = (U * S @ Vt - matrix).norm()
    assert abs(float(lost - expected[kept:].norm())) <= TOLERANCE * max(1.0, size)
    for k in range(kept):
        sizes = U[:, k].abs()
        assert U[(sizes >= sizes.max() * (1 - 1e-4)).nonzero()[0], k] > 0


def test_svd_of_a_float32_pair_is_computed_in_float64_with_signs_of_the_matrix_alone() -> None:
    rng = torch.Generator().manual_seed(0)
    pair = lowrank.LowRank(torch.randn((9, 2), generator=rng), torch.randn((2, 8), generator=rng))
    U, S, Vt = lowrank.svd(pair)
    assert U.dtype == S.dtype == Vt.dtype == torch.float64
    assert _equal(U * S @ Vt, pair.to(torch.float64).to_dense())
    rng = torch.Generator().manual_seed(1)
    U, Vt = torch.randn((6, 3), generator=rng), torch.randn((3, 5), generator=rng)
    flipped = torch.tensor([-1.0, 1.0, -1.0])
    first, second = lowrank.fix_signs(U, Vt), lowrank.fix_signs(U * flipped, Vt * flipped[:, None])
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert _equal((first[0] @ first[1]).double(), (U @ Vt).double(), 1e3)


@few
@given(st.integers(2, 9), st.integers(1, 4), st.integers(0, 2**20))
def test_signs_of_vectors_with_ties_survive_rounding(rows: int, columns: int, seed: int) -> None:
    """Other processors round the last digits otherwise, and often the two largest entries are equal."""
    rng = torch.Generator().manual_seed(seed)
    U = torch.randn((rows, columns), generator=rng, dtype=torch.float64).clamp(-1.5, 1.5)
    U[torch.randperm(rows, generator=rng)[:2]] = torch.tensor([[2.0], [-2.0]], dtype=torch.float64)
    Vt = torch.randn((columns, 3), generator=rng, dtype=torch.float64)
    fixed = lowrank.fix_signs(U, Vt)
    for scale in (1e-15, 1e-7, 1e-5):
        rounded = U * (1 + scale * torch.randn(U.shape, generator=rng, dtype=torch.float64))
        assert torch.equal(lowrank.fix_signs(rounded, Vt)[1], fixed[1])


def test_factors_that_do_not_multiply_are_refused() -> None:
    with pytest.raises(ValueError, match="do not multiply"):
        lowrank.LowRank(torch.zeros(4, 2), torch.zeros(3, 5))
    with pytest.raises(ValueError, match="at least one"):
        lowrank.concatenate([])


@few
@given(low_rank())
def test_splits_of_an_svd_multiply_to_the_matrix(pair: lowrank.LowRank) -> None:
    """Balanced factors have equal Gram matrices; where a singular value is 0, B alone is."""
    U, S, Vt = lowrank.svd(pair)
    size = float(_dense(pair).norm())
    assert _equal(lowrank.assign_values_to_B(U, S, Vt).to_dense(), _dense(pair), size)
    assert _equal(lowrank.assign_values_to_B(U, S, Vt).A, Vt)
    even = lowrank.balance_factors(U, S, Vt)
    assert _equal(even.to_dense(), _dense(pair), size)
    rank = int(torch.linalg.matrix_rank(_dense(pair)))
    assert _equal((even.B.T @ even.B)[:rank, :rank], torch.diag(S[:rank]), size)
    assert _equal((even.A @ even.A.T)[:rank, :rank], torch.diag(S[:rank]), size)
    assert not even.B[:, rank:].any()
    assert _equal(even.A[rank:], Vt[rank:])


def test_a_singular_value_is_0_to_rounding_by_the_longer_side() -> None:
    S = torch.tensor([1.0, 50 * torch.finfo(torch.float64).eps], dtype=torch.float64)
    tall, short = torch.eye(100, 2, dtype=torch.float64), torch.eye(2, 3, dtype=torch.float64)
    for pair in (lowrank.balance_factors(tall, S, short), lowrank.balance_factors(short.T, S, tall.T)):
        assert not pair.B[:, 1].any()


def test_a_randomized_svd_that_would_save_nothing_is_the_full_one() -> None:
    matrix = torch.randn((40, 13), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    full, found = (
        lowrank.compute_leading_svd(matrix, 3),
        lowrank.compute_leading_svd(matrix, 3, create_generator(1, "leading")),
    )
    assert all(torch.equal(one, other) for one, other in zip(found, full, strict=True))


@pytest.mark.parametrize("shape", [(40, 25), (25, 40), (6, 9)])
@pytest.mark.parametrize("randomized", [False, True])
def test_leading_triples_of_a_dense_matrix(shape: tuple[int, int], randomized: bool) -> None:
    """A slowly falling spectrum (1 / k): 8 iterations bring the randomized values to 1e-6 of the full ones."""
    rng = torch.Generator().manual_seed(2)
    U, _, Vt = torch.linalg.svd(torch.randn(shape, generator=rng, dtype=torch.float64), full_matrices=False)
    S = 1.0 / torch.arange(1, min(shape) + 1, dtype=torch.float64)
    matrix = U * S @ Vt
    draws = (create_generator(1, "leading"), create_generator(1, "leading")) if randomized else (None, None)
    found, again = lowrank.compute_leading_svd(matrix, 3, draws[0]), lowrank.compute_leading_svd(matrix, 3, draws[1])
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    tolerance = 1e-6 if randomized else 1e-9
    assert torch.allclose(found[1], S[:3], rtol=tolerance, atol=0)
    best = U[:, :3] * S[:3] @ Vt[:3]
    assert float((found[0] * found[1] @ found[2] - best).norm()) < tolerance
    assert (found[0][found[0].abs().argmax(0), range(3)] > 0).all()


few_cases = settings(max_examples=30, deadline=None)
shapes = st.tuples(st.integers(1, 7), st.integers(1, 7))


def stack(seed: int, shape: tuple[int, int], ranks: list[int], dtype: torch.dtype = torch.float64) -> Reduced:
    """Random replies of unequal weights; scaling 6 / rank."""
    rng = create_generator(seed, "stack")
    total = sum(range(1, len(ranks) + 1))
    items = []
    for k, rank in enumerate(ranks):
        A = torch.randn((rank, shape[1]), generator=rng, dtype=torch.float64).to(dtype)
        B = torch.randn((shape[0], rank), generator=rng, dtype=torch.float64).to(dtype)
        items.append(StackItem(Client(f"c{k}", rank, 6 / rank, 1, 1.0), (k + 1) / total, {"one/A": A, "one/B": B}))
    return Reduced(stack=tuple(items), count=len(items))


def dense_mean(reduced: Reduced) -> Tensor:
    """``sum_i p_i s_i B_i A_i``, one product after another."""
    products = [one.weight * one.client.scaling * one.tensors["one/B"] @ one.tensors["one/A"] for one in reduced.stack]
    return torch.stack(products).sum(0)


@few_cases
@given(st.integers(0, 999), shapes, st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_products(seed: int, shape: tuple[int, int], ranks: list[int]) -> None:
    reduced = stack(seed, shape, ranks)
    pair = sum_products("one", reduced)
    assert pair.rank == sum(ranks)
    assert torch.allclose(pair.to_dense(), dense_mean(reduced), atol=1e-9)


@few_cases
@given(st.integers(0, 999), shapes, st.integers(1, 5), st.integers(1, 4), st.one_of(st.none(), st.integers(1, 9)))
def test_residual(seed: int, shape: tuple[int, int], count: int, rank: int, kept: int | None) -> None:
    """Rank (K - 1) r as factors; the best approximation of the rank asked for."""
    reduced = stack(seed, shape, [rank] * count)
    means, s = average_stack(reduced), 6 / rank
    lost = dense_mean(reduced) - s * means["one/B"] @ means["one/A"]
    found = compute_residual("one", reduced, means["one/B"], s, kept)
    assert found.rank <= (count - 1) * rank
    cut = torch.linalg.svdvals(lost)[found.rank if kept is None else kept :]
    assert torch.isclose((found.to_dense() - lost).norm(), cut.norm(), atol=1e-9)
    if kept is not None and kept < min(found.rank, *shape):
        assert found.rank == kept


def test_means_are_summed_in_float64_and_given_back_as_they_came() -> None:
    """Many small replies after a large one: a float32 sum would lose them."""
    clients = [Client(f"c{k:04d}", 1, 1.0, 1, 1.0) for k in range(1001)]
    values = [torch.full((2, 2), 2.0**24)] + [torch.ones(2, 2)] * 1000
    items = [StackItem(one, 1.0, {"one/A": value}) for one, value in zip(clients, values, strict=True)]
    mean = average_stack(Reduced(stack=tuple(items), count=1001))["one/A"]
    assert mean.dtype == torch.float32
    assert torch.equal(mean, torch.full((2, 2), 2.0**24 + 1000))


@pytest.mark.parametrize(("rank", "kind"), [(2, lowrank.LowRank), (4, lowrank.LowRank), (5, Tensor)])
def test_the_smaller_form(rank: int, kind: type) -> None:
    """6 x 12: factors of rank 4 are as many elements as the matrix."""
    pair = lowrank.LowRank(torch.ones(6, rank), torch.ones(rank, 12), 0.5)
    form = choose_smaller_form(pair)
    assert type(form) is kind
    assert torch.equal(form if isinstance(form, Tensor) else form.to_dense(), pair.to_dense())


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_layers_are_mapped_in_order_on_one_thread_each(threads: int) -> None:
    """Bits do not depend on the number of threads, which is afterwards what it was."""
    layers = [LayerSpec(f"layer{k}", 30, 20) for k in range(7)]
    seen: set[int] = set()

    def work(layer: LayerSpec) -> tuple[Tensor, ...]:
        seen.add(torch.get_num_threads())
        rng = create_generator(0, layer.name)
        return lowrank.svd(lowrank.LowRank(torch.randn((30, 9), generator=rng), torch.randn((9, 20), generator=rng)))

    expected = {layer.name: work(layer) for layer in layers}
    seen.clear()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = map_layers(work, layers)
        assert torch.get_num_threads() == threads
        with pytest.raises(ZeroDivisionError):
            map_layers(lambda layer: 1 // 0, layers)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert seen == {1}
    assert list(found) == list(expected)
    for name, values in expected.items():
        assert all(torch.equal(one, other) for one, other in zip(found[name], values, strict=True))
    assert map_layers(work, []) == {}


SIDES = ("right", "left")


def _projection(P: Tensor, side: str) -> Tensor:
    """The orthogonal projection of the side's space onto the directions of P."""
    P = P.double()
    return P.T @ P if side == "right" else P @ P.T


def test_the_shorter_side_is_projected_and_square_counts_as_tall() -> None:
    assert choose_side((8, 5)) == "right"
    assert choose_side((5, 8)) == "left"
    assert choose_side((6, 6)) == "right"


def _gradient(rows: int, columns: int, tokens: int, seed: int) -> lowrank.LowRank:
    """dY^T X, some of whose rows may be linear combinations of others."""
    rng = torch.Generator().manual_seed(seed)
    return lowrank.LowRank(torch.randn((rows, tokens), generator=rng), torch.randn((tokens, columns), generator=rng))


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
    gradient = lowrank.LowRank(B @ mix, mix.T @ V.T) if tokens > 40 else lowrank.LowRank(B[:, :tokens], V.T[:tokens])
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
    zero = lowrank.LowRank(torch.zeros(6, 3), torch.randn(3, 5))
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
