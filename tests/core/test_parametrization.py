"""Parametrizations, structured bases and base updates against dense weights, formulas and the chain rule by hand."""

import math
from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from fedspan.core import parametrization as forms
from fedspan.core.base import BaseUpdate, Delta, Increment, apply_patch, materialize, to_dense
from fedspan.core.lowrank import LowRank

OUT, IN = 7, 6
KERNEL = (3, 2)  # with one channel, a convolution's weight is 7 x 6 too
SIDES = {"O": OUT, "I": IN, "R": 3, "P": 2, "K": 6, "Q": 4}
S, P = 0.5, 3.0
Slots = dict[str, Tensor]

CASES: dict[str, tuple[forms.Parametrization, Callable[[Tensor, Slots], Tensor]]] = {
    "LoRA": (forms.LoRA(S), lambda W, x: W + S * x["B"] @ x["A"]),
    "PairSum": (forms.PairSum(S, P), lambda W, x: W + S * x["B"] @ x["A"] + P * x["L"] @ x["U"]),
    "Nested": (
        forms.Nested(S, P),
        lambda W, x: W + S * (x["B"] + P * x["B_d"] @ x["B_u"]) @ (x["A"] + P * x["A_d"] @ x["A_u"]),
    ),
    "Core": (forms.Core(S), lambda W, x: W + S * x["B"] @ x["R"] @ x["A"]),
    "Gram": (forms.Gram(S), lambda W, x: W + S * x["L"] @ x["A"].T @ x["A"] @ x["R"]),
    "Projected right": (forms.Projected("right"), lambda W, x: W + x["acc"] @ x["P"] + x["done_B"] @ x["done_A"]),
    "Projected left": (forms.Projected("left"), lambda W, x: W + x["P"] @ x["acc"] + x["done_B"] @ x["done_A"]),
    "Factorized": (forms.Factorized(), lambda W, x: x["U"] @ x["V"]),
    "FactorizedConv": (
        forms.FactorizedConv(KERNEL),
        # Row o k1 + a of U, column c k2 + b of V: entry (o, c, a, b) of the convolution.
        lambda W, x: torch.einsum("oar,rcb->ocab", x["U"].view(OUT, 3, 3), x["V"].view(3, 1, 2)).reshape(OUT, IN),
    ),
    "Dense": (forms.Dense(), lambda W, x: x["W"]),
    "DenseLoRA": (forms.DenseLoRA(P), lambda W, x: x["W"] + P * x["L"] @ x["U"]),
}


def _case(name: str) -> tuple[forms.Parametrization, Slots, Callable[[Tensor, Slots], Tensor], Tensor]:
    parametrization, formula = CASES[name]
    rng, rectangle = torch.Generator().manual_seed(0), (OUT * 3, 2) if name == "FactorizedConv" else (OUT, IN)
    sides = {**SIDES, **dict(zip("oi", rectangle, strict=True))}
    slots = {
        slot: torch.randn([sides[side] for side in letters], generator=rng, dtype=torch.float64, requires_grad=True)
        for slot, letters in parametrization.slots.items()
    }
    return parametrization, slots, formula, torch.randn((OUT, IN), generator=rng, dtype=torch.float64)


@pytest.mark.parametrize("name", CASES)
def test_weight_and_gradients_are_those_of_the_formula(name: str) -> None:
    parametrization, slots, formula, W = _case(name)
    G = torch.randn((OUT, IN), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = formula(W, slots)
    actual = W + forms.compute_dense_change(parametrization.compute_effective(slots), W)
    assert torch.allclose(actual, expected, rtol=0, atol=1e-12)
    ours = torch.autograd.grad((actual * G).sum(), list(slots.values()))
    theirs = torch.autograd.grad((expected * G).sum(), list(slots.values()))
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
        assert other.any()
    x = torch.randn((4, IN), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    effective = parametrization.compute_effective(slots)  # x (weight or W)^T + pair(x); W only where base is true
    y = torch.zeros((4, OUT), dtype=torch.float64)
    if effective.base:
        assert effective.weight is None
        y = y + x @ W.T
    if effective.weight is not None:
        y = y + x @ effective.weight.T
    if effective.pair is not None:
        assert isinstance(effective.pair, LowRank)
        y = y + (x @ effective.pair.A.T) @ effective.pair.B.T * effective.pair.scale
    assert torch.allclose(y, x @ expected.T, rtol=0, atol=1e-12)


def test_gram_gradient_is_that_of_florg() -> None:
    """grad_A = A (H + H^T) with H = s L^T G R^T (FLoRG), for a G that is not symmetric."""
    parametrization, slots, _, W = _case("Gram")
    G = torch.randn((OUT, IN), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (gradient,) = torch.autograd.grad(
        (forms.compute_dense_change(parametrization.compute_effective(slots), W) * G).sum(), [slots["A"]]
    )
    H = S * slots["L"].T @ G @ slots["R"].T
    assert torch.allclose(gradient, slots["A"] @ (H + H.T), rtol=0, atol=1e-12)


def test_sparse_values_stand_at_their_positions() -> None:
    """Row by row, and each value's gradient is the dense gradient's entry there."""
    rng = torch.Generator().manual_seed(5)
    W, G = (torch.randn((OUT, IN), generator=rng, dtype=torch.float64) for _ in range(2))
    values = torch.randn(3, generator=rng, dtype=torch.float64, requires_grad=True)
    places = [(0, 4), (3, 0), (6, 5)]
    entries = torch.tensor([row * IN + column for row, column in places])
    effective = forms.Sparse((OUT, IN)).compute_effective({"values": values, "entries": entries})
    change = forms.compute_dense_change(effective, W)
    expected = torch.zeros((OUT, IN), dtype=torch.float64)
    for (row, column), value in zip(places, values.tolist(), strict=True):
        expected[row, column] = value
    assert torch.allclose(change, expected, rtol=0, atol=1e-12)
    (gradient,) = torch.autograd.grad((change * G).sum(), [values])
    assert torch.equal(gradient, torch.stack([G[place] for place in places]))


@pytest.mark.parametrize("side", ["right", "left"])
def test_projected_without_finished_segments(side: str) -> None:
    parametrization, slots, _, _ = _case(f"Projected {side}")
    pair = parametrization.compute_effective({"acc": slots["acc"], "P": slots["P"]}).pair
    assert isinstance(pair, LowRank)
    expected = slots["acc"] @ slots["P"] if side == "right" else slots["P"] @ slots["acc"]
    assert torch.equal(pair.to_dense(), expected)


@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (3, 2), (1, 5)])
def test_a_pair_of_the_rectangle_is_two_convolutions(kernel: tuple[int, int]) -> None:
    """First (1, k2) with R filters, then (k1, 1) with O: FedHM's factorized convolution, against ``conv2d`` itself."""
    rows, channels, rank, rng = 4, 3, 2, torch.Generator().manual_seed(4)
    k1, k2 = kernel
    U = torch.randn((rows * k1, rank), generator=rng, dtype=torch.float64)
    V = torch.randn((rank, channels * k2), generator=rng, dtype=torch.float64)
    effective = forms.FactorizedConv(kernel).compute_effective({"U": U, "V": V})
    assert not effective.base
    x = torch.randn((2, channels, 7, 8), generator=rng, dtype=torch.float64)
    whole = F.conv2d(x, effective.weight.view(rows, channels, k1, k2))
    halfway = F.conv2d(x, V.view(rank, channels, 1, k2))
    both = F.conv2d(halfway, U.view(rows, k1, rank).permute(0, 2, 1).unsqueeze(3))
    assert torch.allclose(whole, both, rtol=0, atol=1e-12)
    assert torch.equal(forms.reshape_to_rectangle(effective.weight, kernel), U @ V)
    weight = torch.randn((rows, channels * k1 * k2), generator=rng)
    assert torch.equal(forms.reshape_to_convolution(forms.reshape_to_rectangle(weight, kernel), kernel), weight)


few = settings(max_examples=25, deadline=None)


def written_out(longer: int, shorter: int, seed: int) -> Tensor:
    """M (K, N): sign_j c_j cos(pi j (4 place_i + 1) / 2 N), with c_0 = sqrt(1 / N) and c_j = sqrt(2 / N)."""
    places, signs = forms.draw_mixing_keys(longer, shorter, seed, "layer")
    j, scale = torch.arange(longer, dtype=torch.float64), torch.full((longer,), 2 / longer, dtype=torch.float64)
    scale[0] = 1 / longer
    return signs * scale.sqrt() * torch.cos(math.pi * j * (4 * places.double()[:, None] + 1) / (2 * longer))


@few
@given(st.integers(1, 12), st.integers(0, 12), st.integers(1, 4), st.integers(0, 1000))
def test_the_fast_product_is_that_with_an_orthonormal_matrix(shorter: int, more: int, rank: int, seed: int) -> None:
    longer = shorter + more
    M = written_out(longer, shorter, seed)
    assert (M @ M.T - torch.eye(shorter, dtype=torch.float64)).abs().max() < 1e-12
    A = torch.randn(rank, shorter, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    places, signs = forms.draw_mixing_keys(longer, shorter, seed, "layer")
    assert (forms.multiply_by_mixing(A, places, signs) - A @ M).abs().max() < 1e-12 * (1 + float(A.abs().max()))


def test_gradients_and_batches_pass_through() -> None:
    M = written_out(7, 5, 1)
    keys = forms.draw_mixing_keys(7, 5, 1, "layer")
    A = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    out = forms.multiply_by_mixing(A, *keys)
    assert torch.allclose(out, A @ M, atol=1e-12)
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
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
    M, (places, signs) = written_out(longer, shorter, 5), forms.draw_mixing_keys(longer, shorter, 5, "layer")
    A = torch.randn(2, shorter, dtype=torch.float64)
    pair = forms.MixedGram(0.5, side).compute_effective({"A": A, "places": places, "signs": signs}).pair
    L, R = (torch.eye(shorter).double(), M) if side == "right" else (M.T, torch.eye(shorter).double())
    assert torch.allclose(pair.to_dense(), 0.5 * L @ A.T @ A @ R, atol=1e-12)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (6, 6)])
def test_dense_bases_are_orthonormal_and_the_same_for_every_holder_of_the_key(shape: tuple[int, int]) -> None:
    L, R = forms.draw_dense_bases(shape, 3, "layer")
    forms.draw_dense_bases.cache_clear()
    again = forms.draw_dense_bases(shape, 3, "layer")
    assert torch.equal(L, again[0])
    assert torch.equal(R, again[1])
    assert not torch.equal(L, forms.draw_dense_bases(shape, 4, "layer")[0])
    k = min(shape)
    assert (L.shape, R.shape) == ((shape[0], k), (k, shape[1]))
    for gram in (L.T @ L, R @ R.T):
        assert (gram - torch.eye(k)).abs().max() < 1e-6


BASE_SHAPES = {"tall": (6, 4), "wide": (3, 8)}


@st.composite
def increments(draw: st.DrawFn, dtype: torch.dtype = torch.float64) -> list[Increment | None]:
    """Rounds of a run: in some nothing moves; ranks, layers, decay and the form of a change vary."""
    rounds: list[Increment | None] = []
    for number in range(1, draw(st.integers(1, 7)) + 1):
        if draw(st.booleans()) and draw(st.booleans()):
            rounds.append(None)
            continue
        rng = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
        deltas: dict[str, Delta] = {}
        for layer in draw(st.sets(st.sampled_from(sorted(BASE_SHAPES)))):
            rows, columns = BASE_SHAPES[layer]
            if draw(st.integers(0, 4)) == 0:
                deltas[layer] = torch.randn((rows, columns), generator=rng, dtype=dtype)
            else:
                rank = draw(st.integers(0, 3))
                B = torch.randn((rows, rank), generator=rng, dtype=dtype)
                A = torch.randn((rank, columns), generator=rng, dtype=dtype)
                deltas[layer] = LowRank(B, A, draw(st.sampled_from([1.0, 2.0, -0.5])))
        rounds.append(Increment(number, deltas, draw(st.sampled_from([1.0, 1.0, 0.9]))))
    return rounds


def _matrix(delta: Delta) -> Tensor:
    return delta.scale * delta.B @ delta.A if isinstance(delta, LowRank) else delta


def _list_parts(deltas: Mapping[str, Delta], layer: str) -> tuple[Tensor, ...]:
    delta = deltas[layer]
    return (delta.B, delta.A, torch.tensor(delta.scale)) if isinstance(delta, LowRank) else (delta,)


def _same_bits(one: Mapping[str, Delta], other: Mapping[str, Delta]) -> bool:
    pairs = [(_list_parts(one, layer), _list_parts(other, layer)) for layer in one if layer in other]
    return set(one) == set(other) and all(len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in pairs)


@given(increments())
@settings(max_examples=25, deadline=None)
def test_increments_add_up_to_the_dense_oracle(rounds: list[Increment | None]) -> None:
    rng = torch.Generator().manual_seed(0)
    W0 = {layer: torch.randn(shape, generator=rng, dtype=torch.float64) for layer, shape in BASE_SHAPES.items()}
    W, base = dict(W0), BaseUpdate()
    for increment in rounds:
        if increment is None:
            continue
        base = base.add(increment)
        for layer in W:
            W[layer] = increment.decay * W[layer]
            if layer in increment.deltas:
                W[layer] = W[layer] + _matrix(increment.deltas[layer])
        for layer, weight in W.items():
            assert torch.allclose(materialize(W0[layer], base, layer), weight, rtol=0, atol=1e-9)
        for layer, delta in base.total.items():
            # Factors only while they are the shorter form.
            assert delta.numel() <= W0[layer].numel()
            assert to_dense(delta).shape == BASE_SHAPES[layer]


@given(increments(torch.float32), st.data())
@settings(max_examples=30, deadline=None)
def test_clients_hold_the_servers_bits_whatever_they_missed(
    rounds: list[Increment | None], data: st.DataObject
) -> None:
    """Each client is asked in some rounds, some of its replies are lost, and it is sent ``since(held)`` alone."""
    server, parties = BaseUpdate(), 3
    held: list[int | None] = [None] * parties
    bases = [BaseUpdate()] * parties
    for number, increment in enumerate([*rounds, None]):
        for client in range(parties):
            if not data.draw(st.booleans(), label=f"round {number} asks {client}") and number < len(rounds):
                continue  # in the last round everybody is asked
            patch = server.build_patch(held[client])
            after = apply_patch(bases[client], patch)
            assert _same_bits(after.total, server.total)
            assert after.rho == server.rho
            assert after.moved == server.moved
            if patch is not None:
                assert patch.numel() <= sum(delta.numel() for delta in server.total.values())
            if data.draw(st.booleans(), label=f"reply of {client} accepted"):
                bases[client], held[client] = after, number
        if increment is not None:
            server = server.add(increment)


@given(increments())
@settings(max_examples=25, deadline=None)
def test_the_kept_increments_are_no_larger_than_the_total(rounds: list[Increment | None]) -> None:
    base = BaseUpdate()
    for increment in rounds:
        if increment is None:
            continue
        base = base.add(increment)
        kept, total = sum(one.numel() for one in base.recent), sum(one.numel() for one in base.total.values())
        assert kept <= total or len(base.recent) == 1
        assert base.recent[-1] is increment
        # Whoever holds any round is served: nothing, increments, or all.
        for held in range(base.round + 1):
            patch = base.build_patch(held)
            if held == base.round:
                assert patch is None
            elif patch is not None and not patch.whole:
                assert [one.round for one in patch.increments] == [
                    one.round for one in rounds if one is not None and held < one.round <= base.round
                ]


def test_a_client_that_holds_the_base_is_sent_nothing() -> None:
    assert BaseUpdate().build_patch(None) is None
    base = BaseUpdate().add(Increment(3, {"tall": LowRank(torch.ones(6, 1), torch.ones(1, 4))}))
    assert base.build_patch(3) is base.build_patch(7) is None
    patch = base.build_patch(2)
    assert patch.numel() == 10
    assert apply_patch(base, None) is base


def test_decay_of_a_layer_that_never_moved() -> None:
    base = BaseUpdate().add(Increment(1, {}, decay=0.5)).add(Increment(2, {}, decay=0.5))
    W0 = torch.randn(3, 2)
    assert torch.equal(materialize(W0, base, "any"), W0 * 0.25)
    assert torch.equal(materialize(W0, apply_patch(BaseUpdate(), base.build_patch(None)), "any"), W0 * 0.25)


def test_weights_of_record_are_never_written_and_low_precision_is_widened() -> None:
    W0 = torch.ones((6, 4), dtype=torch.bfloat16)
    small = LowRank(torch.full((6, 1), 1e-3), torch.ones(1, 4))  # below bfloat16's resolution at 1
    base = BaseUpdate()
    for number in range(1, 5):
        base = base.add(Increment(number, {"tall": small}))
    moved = materialize(W0, base, "tall")
    assert moved.dtype == torch.float32
    assert torch.allclose(moved, torch.full((6, 4), 1.004), rtol=0, atol=1e-6)
    assert torch.equal(W0, torch.ones((6, 4), dtype=torch.bfloat16))


def test_increments_must_come_in_order() -> None:
    base = BaseUpdate().add(Increment(2, {}))
    with pytest.raises(ValueError, match="round 2 on a base of round 2"):
        base.add(Increment(2, {}))


def test_a_method_may_move_the_base_before_the_first_round() -> None:
    """FeDeRA and FR-LoRA start from W0 - s B0 A0, FLoRG's centered form from W0 - L A1^T A1 R."""
    step = Increment(0, {"tall": LowRank(-torch.ones(6, 1), torch.ones(1, 4))})
    base = BaseUpdate().add(step)
    patch = base.build_patch(None)
    held = apply_patch(BaseUpdate(), patch)
    assert base.build_patch(0) is None
    base = base.add(Increment(1, {"tall": LowRank(torch.ones(6, 1), torch.ones(1, 4))}))
    assert _same_bits(apply_patch(held, base.build_patch(0)).total, base.total)
