"""Every parametrization against the dense weight of its formula, and its gradients against the chain rule by hand."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedspan.core.lowrank import LowRank
from fedspan.core.parametrization import (
    Core,
    Dense,
    DenseLoRA,
    Effective,
    Factorized,
    FactorizedConv,
    Gram,
    LoRA,
    Nested,
    PairSum,
    Parametrization,
    Projected,
    Sparse,
    compute_dense_change,
    reshape_to_convolution,
    reshape_to_rectangle,
)

OUT, IN = 7, 6
KERNEL = (3, 2)  # with one channel, a convolution's weight is 7 x 6 too
SHAPES = {
    "A": (3, IN),
    "B": (OUT, 3),
    "L": (OUT, 2),
    "U": (2, IN),
    "W": (OUT, IN),
    "V": (4, IN),
    "done_B": (OUT, 4),
    "done_A": (4, IN),
}
S, P = 0.5, 3.0
Slots = dict[str, Tensor]

CASES: dict[str, tuple[Parametrization, dict[str, tuple[int, int]], Callable[[Tensor, Slots], Tensor]]] = {
    "LoRA": (LoRA(S), {}, lambda W, x: W + S * x["B"] @ x["A"]),
    "PairSum": (PairSum(S, P), {}, lambda W, x: W + S * x["B"] @ x["A"] + P * x["L"] @ x["U"]),
    "Nested": (
        Nested(S, P),
        {"A_d": (3, 2), "A_u": (2, IN), "B_d": (OUT, 2), "B_u": (2, 3)},
        lambda W, x: W + S * (x["B"] + P * x["B_d"] @ x["B_u"]) @ (x["A"] + P * x["A_d"] @ x["A_u"]),
    ),
    "Core": (Core(S), {"R": (3, 3)}, lambda W, x: W + S * x["B"] @ x["R"] @ x["A"]),
    "Gram": (
        Gram(S),
        {"A": (2, 6), "L": (OUT, 6), "R": (6, IN)},
        lambda W, x: W + S * x["L"] @ x["A"].T @ x["A"] @ x["R"],
    ),
    "Projected right": (
        Projected("right"),
        {"acc": (OUT, 2), "P": (2, IN)},
        lambda W, x: W + x["acc"] @ x["P"] + x["done_B"] @ x["done_A"],
    ),
    "Projected left": (
        Projected("left"),
        {"acc": (2, IN), "P": (OUT, 2)},
        lambda W, x: W + x["P"] @ x["acc"] + x["done_B"] @ x["done_A"],
    ),
    "Factorized": (Factorized(), {"U": (OUT, 4)}, lambda W, x: x["U"] @ x["V"]),
    "FactorizedConv": (
        FactorizedConv(KERNEL),
        {"U": (OUT * 3, 4), "V": (4, 2)},
        # Row o k1 + a of U, column c k2 + b of V: entry (o, c, a, b) of the convolution.
        lambda W, x: torch.einsum("oar,rcb->ocab", x["U"].view(OUT, 3, 4), x["V"].view(4, 1, 2)).reshape(OUT, IN),
    ),
    "Dense": (Dense(), {}, lambda W, x: x["W"]),
    "DenseLoRA": (DenseLoRA(P), {}, lambda W, x: x["W"] + P * x["L"] @ x["U"]),
}


def _case(name: str) -> tuple[Parametrization, Slots, Callable[[Tensor, Slots], Tensor], Tensor]:
    parametrization, shapes, formula = CASES[name]
    rng = torch.Generator().manual_seed(0)
    names: tuple[str, ...] = parametrization.slots
    slots = {
        slot: torch.randn({**SHAPES, **shapes}[slot], generator=rng, dtype=torch.float64, requires_grad=True)
        for slot in names
    }
    return parametrization, slots, formula, torch.randn((OUT, IN), generator=rng, dtype=torch.float64)


@pytest.mark.parametrize("name", CASES)
def test_weight_and_gradients_are_those_of_the_formula(name: str) -> None:
    parametrization, slots, formula, W = _case(name)
    G = torch.randn((OUT, IN), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = formula(W, slots)
    actual = W + compute_dense_change(parametrization.compute_effective(slots), W)
    assert torch.allclose(actual, expected, rtol=0, atol=1e-12)
    ours = torch.autograd.grad((actual * G).sum(), list(slots.values()))
    theirs = torch.autograd.grad((expected * G).sum(), list(slots.values()))
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
        assert other.any()


@pytest.mark.parametrize("name", CASES)
def test_what_a_layer_computes_is_the_weight_times_its_input(name: str) -> None:
    """The rule of ``Effective``: x (weight or W)^T + pair(x), the frozen base only where ``base`` is true."""
    parametrization, slots, formula, W = _case(name)
    x = torch.randn((4, IN), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    effective: Effective = parametrization.compute_effective(slots)
    y = torch.zeros((4, OUT), dtype=torch.float64)
    if effective.base:
        assert effective.weight is None
        y = y + x @ W.T
    if effective.weight is not None:
        y = y + x @ effective.weight.T
    if effective.pair is not None:
        assert isinstance(effective.pair, LowRank)
        y = y + (x @ effective.pair.A.T) @ effective.pair.B.T * effective.pair.scale
    assert torch.allclose(y, x @ formula(W, slots).T, rtol=0, atol=1e-12)


def test_gram_gradient_is_that_of_florg() -> None:
    """grad_A = A (H + H^T) with H = s L^T G R^T (FLoRG), for a G that is not symmetric."""
    parametrization, slots, _, W = _case("Gram")
    G = torch.randn((OUT, IN), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (gradient,) = torch.autograd.grad(
        (compute_dense_change(parametrization.compute_effective(slots), W) * G).sum(), [slots["A"]]
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
    effective = Sparse((OUT, IN)).compute_effective({"values": values, "entries": entries})
    change = compute_dense_change(effective, W)
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
    effective = FactorizedConv(kernel).compute_effective({"U": U, "V": V})
    assert not effective.base
    x = torch.randn((2, channels, 7, 8), generator=rng, dtype=torch.float64)
    whole = F.conv2d(x, effective.weight.view(rows, channels, k1, k2))
    halfway = F.conv2d(x, V.view(rank, channels, 1, k2))
    both = F.conv2d(halfway, U.view(rows, k1, rank).permute(0, 2, 1).unsqueeze(3))
    assert torch.allclose(whole, both, rtol=0, atol=1e-12)
    assert torch.equal(reshape_to_rectangle(effective.weight, kernel), U @ V)
    weight = torch.randn((rows, channels * k1 * k2), generator=rng)
    assert torch.equal(reshape_to_convolution(reshape_to_rectangle(weight, kernel), kernel), weight)
