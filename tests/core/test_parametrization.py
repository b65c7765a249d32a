"""Every parametrization against the dense weight of its formula, and its gradients against the chain rule by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fedspan.core.parametrization import (
    Dense,
    DenseLoRA,
    Effective,
    Factorised,
    Gram,
    LoRA,
    PairSum,
    Parametrization,
    Projected,
    dense_change,
)

OUT, IN = 7, 5
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
    "Gram": (
        Gram(S),
        {"A": (2, 5), "L": (OUT, 5), "R": (5, IN)},
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
    "Factorised": (Factorised(), {"U": (OUT, 4)}, lambda W, x: x["U"] @ x["V"]),
    "Dense": (Dense(), {}, lambda W, x: x["W"]),
    "DenseLoRA": (DenseLoRA(P), {}, lambda W, x: x["W"] + P * x["L"] @ x["U"]),
}


def _case(name: str) -> tuple[Parametrization, Slots, Callable[[Tensor, Slots], Tensor], Tensor]:
    parametrization, shapes, formula = CASES[name]
    rng = torch.Generator().manual_seed(0)
    names: tuple[str, ...] = parametrization.slots  # type: ignore[attr-defined]
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
    actual = W + dense_change(parametrization.effective(slots), W)
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
    effective: Effective = parametrization.effective(slots)
    y = torch.zeros((4, OUT), dtype=torch.float64)
    if effective.base:
        assert effective.weight is None
        y = y + x @ W.T
    if effective.weight is not None:
        y = y + x @ effective.weight.T
    if effective.pair is not None:
        y = y + (x @ effective.pair.A.T) @ effective.pair.B.T * effective.pair.scale
    assert torch.allclose(y, x @ formula(W, slots).T, rtol=0, atol=1e-12)


def test_gram_gradient_is_that_of_florg() -> None:
    """grad_A = A (H + H^T) with H = s L^T G R^T (FLoRG), for a G that is not symmetric."""
    parametrization, slots, _, W = _case("Gram")
    G = torch.randn((OUT, IN), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (gradient,) = torch.autograd.grad((dense_change(parametrization.effective(slots), W) * G).sum(), [slots["A"]])
    H = S * slots["L"].T @ G @ slots["R"].T
    assert torch.allclose(gradient, slots["A"] @ (H + H.T), rtol=0, atol=1e-12)


@pytest.mark.parametrize("side", ["right", "left"])
def test_projected_without_finished_segments(side: str) -> None:
    parametrization, slots, _, _ = _case(f"Projected {side}")
    pair = parametrization.effective({"acc": slots["acc"], "P": slots["P"]}).pair
    assert pair is not None
    expected = slots["acc"] @ slots["P"] if side == "right" else slots["P"] @ slots["acc"]
    assert torch.equal(pair.dense(), expected)
