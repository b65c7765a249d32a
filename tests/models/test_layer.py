"""Linear layers, convolutions and embeddings as targets: what they compute, and their gradients, against plain modules.

The oracle is the module itself, with the dense weight put in and differentiated by autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fedspan.core.base import BaseUpdate, Increment
from fedspan.core.lowrank import LowRank, concatenate
from fedspan.core.parametrization import (
    Dense,
    DenseLoRA,
    Factorized,
    Gram,
    LoRA,
    PairSum,
    Parametrization,
    Projected,
    compute_dense_change,
)
from fedspan.core.tensors import join_tensor_name
from fedspan.errors import FedspanError
from fedspan.models.adapted import AdaptedModel
from helpers.layer_kinds import MODULES, Whole, of_each_fit

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

RANK = 2
SLOTS: Mapping[str, tuple[Parametrization, Callable[[int, int], dict[str, tuple[int, int]]]]] = {
    "LoRA": (LoRA(0.7), lambda m, n: {"A": (RANK, n), "B": (m, RANK)}),
    "PairSum": (PairSum(0.7, 1.3), lambda m, n: {"A": (RANK, n), "B": (m, RANK), "L": (m, 1), "U": (1, n)}),
    "Gram": (Gram(0.5), lambda m, n: {"A": (RANK, min(m, n)), "L": (m, min(m, n)), "R": (min(m, n), n)}),
    "Projected right": (
        Projected("right"),
        lambda m, n: {"acc": (m, RANK), "P": (RANK, n), "done_A": (1, n), "done_B": (m, 1)},
    ),
    "Projected left": (Projected("left"), lambda m, n: {"acc": (RANK, n), "P": (m, RANK)}),
    "Factorized": (Factorized(), lambda m, n: {"U": (m, RANK), "V": (RANK, n)}),
    "Dense": (Dense(), lambda m, n: {"W": (m, n)}),
    "DenseLoRA": (DenseLoRA(1.3), lambda m, n: {"W": (m, n), "L": (m, 1), "U": (1, n)}),
}
of_each_module = pytest.mark.parametrize("kind", MODULES)


def made(kind: str, dtype: torch.dtype = torch.float64) -> tuple[AdaptedModel, nn.Module, Tensor]:
    """A model of one adapted layer, the same module as it was, and an input."""
    torch.manual_seed(sum(map(ord, kind)))
    module, x = MODULES[kind][0]().to(dtype), MODULES[kind][1]()
    plain = MODULES[kind][0]().to(dtype)
    plain.load_state_dict(module.state_dict())
    model = Whole(module)
    return AdaptedModel(model, {"layer": module}, {}), plain, x.to(dtype) if x.is_floating_point() else x


def drawn(adapted: AdaptedModel, name: str) -> dict[str, Tensor]:
    shapes = SLOTS[name][1](*adapted.layers["layer"].operator.shape)
    return {join_tensor_name("layer", slot): torch.randn(shape, dtype=torch.float64) for slot, shape in shapes.items()}


def by_slot(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("layer/"): value for name, value in tensors.items()}


def close(one: Tensor, other: Tensor, tolerance: float = 1e-12) -> bool:
    return float((one - other).detach().abs().max()) <= tolerance * (1 + float(other.detach().abs().max()))


def with_weight(plain: nn.Module, adapted: AdaptedModel, W_OI: Tensor) -> nn.Module:
    weight = plain.get_parameter("weight")
    weight.data = adapted.layers["layer"].operator.to_stored(W_OI.detach()).to(weight.dtype).clone()
    return plain


@of_each_module
@pytest.mark.parametrize("name", SLOTS)
def test_every_parametrization_is_the_module_with_that_weight(kind: str, name: str) -> None:
    """Output and the gradient of every slot, in float64; the chain rule goes through the dense weight."""
    adapted, plain, x = made(kind)
    parametrization, tensors = SLOTS[name][0], drawn(adapted, name)
    live = adapted.install({"layer": parametrization}, tensors, frozenset(tensors))
    out = adapted.model(x)
    direction = torch.randn_like(out)
    (out * direction).sum().backward()

    leaves = {name: value.clone().requires_grad_() for name, value in tensors.items()}
    original = adapted.layers["layer"].get_original()
    W_OI = original + compute_dense_change(parametrization.compute_effective(by_slot(leaves)), original)
    expected = with_weight(plain, adapted, W_OI)(x)
    assert close(out.detach(), expected.detach())
    (expected * direction).sum().backward()
    gradient = plain.get_parameter("weight").grad
    assert gradient is not None
    W_OI.backward(adapted.layers["layer"].operator.to_matrix(gradient))
    for name, leaf in leaves.items():
        found, wanted = live[name].grad, leaf.grad
        assert found is not None
        assert wanted is not None
        assert close(found, wanted), name
        assert float(wanted.abs().max()) > 0.001, name


@of_each_module
def test_captured_gradients_are_autograd_s(kind: str) -> None:
    """Each backward pass has its own, and they add up. They are float32 factors."""
    adapted, plain, x = made(kind)
    tensors = drawn(adapted, "LoRA")
    adapted.install({"layer": LoRA(0.7)}, tensors, frozenset(tensors))
    found: list[LowRank] = []
    original = adapted.layers["layer"].get_original()
    change = compute_dense_change(LoRA(0.7).compute_effective(by_slot(tensors)), original)
    plain = with_weight(plain, adapted, original + change)
    for _ in range(2):
        direction = torch.randn_like(plain(x))
        with adapted.capture_gradients(lambda name, gradient: found.append(gradient)):
            (adapted.model(x) * direction).sum().backward()
        (plain(x) * direction).sum().backward()
    expected = plain.get_parameter("weight").grad
    assert expected is not None
    assert {factor.dtype for gradient in found for factor in (gradient.A, gradient.B)} == {torch.float32}
    assert close(concatenate(found).to_dense().double(), adapted.layers["layer"].operator.to_matrix(expected), 1e-5)


@of_each_module
@pytest.mark.parametrize("form", ["pair", "dense"])
def test_a_base_update_moves_the_weight_and_leaves_w0(kind: str, form: str) -> None:
    adapted, plain, x = made(kind, torch.float32)
    layer = adapted.layers["layer"]
    m, n = layer.operator.shape
    stored, W_OI = layer.stored_weight.detach().clone(), layer.get_original().clone()
    delta = LowRank(torch.randn(m, 1), torch.randn(1, n), 0.5) if form == "pair" else torch.randn(m, n)
    dense = delta.to_dense() if isinstance(delta, LowRank) else delta
    base = BaseUpdate().add(Increment(0, {"layer": delta}, decay=0.5))
    tensors = {name: value.float() for name, value in drawn(adapted, "LoRA").items()}
    pair = LoRA(0.7).compute_effective(by_slot(tensors)).pair
    assert pair is not None
    adapted.set_base(base)
    adapted.install({"layer": LoRA(0.7)}, tensors, frozenset())
    expected = with_weight(plain, adapted, 0.5 * W_OI + dense + pair.to_dense())(x)
    assert close(adapted.model(x), expected, 1e-5)
    assert torch.equal(layer.get_original(), W_OI)
    assert torch.equal(adapted.get_weight("layer"), W_OI)
    adapted.set_base(BaseUpdate())
    adapted.install({}, {}, frozenset())
    assert torch.equal(layer.stored_weight, stored)


@of_each_module
@pytest.mark.parametrize("form", ["pair", "dense"])
def test_in_bfloat16_the_update_stays_beside_the_weight(kind: str, form: str) -> None:
    """A change far below bfloat16's resolution of the weight is not lost in it."""
    adapted, plain, x = made(kind, torch.bfloat16)
    layer = adapted.layers["layer"]
    m, n = layer.operator.shape
    stored = layer.stored_weight.detach().clone()
    delta = LowRank(torch.randn(m, 1), torch.randn(1, n)) if form == "pair" else torch.randn(m, n)
    adapted.set_base(BaseUpdate().add(Increment(0, {"layer": delta})))
    tensors = {name: torch.zeros_like(value).float() for name, value in drawn(adapted, "LoRA").items()}
    adapted.install({"layer": LoRA(1.0)}, tensors, frozenset())
    out = adapted.model(x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(layer.stored_weight, stored)
    dense = delta.to_dense() if isinstance(delta, LowRank) else delta
    wide = with_weight(plain.double(), adapted, layer.get_original().double() + dense.double())
    expected = wide(x.double() if x.is_floating_point() else x)
    assert close(out.double(), expected, 2e-2)
    with pytest.raises(FedspanError, match="this method scales the base"):
        adapted.set_base(BaseUpdate().add(Increment(0, {}, decay=0.5)))


@of_each_module
def test_decay_within_a_job_shrinks_the_base_and_not_the_bias(kind: str) -> None:
    adapted, plain, x = made(kind)
    layer = adapted.layers["layer"]
    tensors = drawn(adapted, "LoRA")
    adapted.install({"layer": LoRA(0.7)}, tensors, frozenset())
    layer.shrink = 0.25
    pair = LoRA(0.7).compute_effective(by_slot(tensors)).pair
    assert pair is not None
    expected = with_weight(plain, adapted, 0.25 * layer.get_original() + pair.to_dense())(x)
    assert close(adapted.model(x), expected)


@of_each_fit
def test_peft_computes_the_same_from_the_same_factors(kind: str) -> None:
    """PEFT's own layers, with the factors as they are exported; and they come back as they went."""
    adapted, plain, x = made(kind, torch.float32)
    operator = adapted.layers["layer"].operator
    m, n = operator.shape
    tensors = {
        join_tensor_name("layer", "A"): torch.randn(RANK, n),
        join_tensor_name("layer", "B"): torch.randn(m, RANK),
    }
    adapted.install({"layer": LoRA(1.5)}, tensors, frozenset())
    config = LoraConfig(r=RANK, lora_alpha=3, target_modules=["layer"], fan_in_fan_out=isinstance(plain, Conv1D))
    theirs = get_peft_model(Whole(plain), config).eval()
    A, B = tensors["layer/A"], tensors["layer/B"]
    stored = operator.to_peft(B, A)
    state = theirs.state_dict()
    for name, value in stored.items():
        first, _, last = name.partition(".")
        full = ".".join(filter(None, ["base_model.model.layer", first, "default", last]))
        assert state[full].shape == value.shape, full
        state[full] = value
    theirs.load_state_dict(state)
    assert close(adapted.model(x), theirs(x), 1e-5)
    back = operator.from_peft(*(stored[name] for name in sorted(stored, reverse=True)))
    assert all(torch.equal(one, other) for one, other in zip(back, (B, A), strict=True))


@pytest.mark.parametrize("kind", ["linear", "conv strided", "conv1d"])
def test_dropout_is_on_the_input_of_the_pair_alone(kind: str) -> None:
    adapted, plain, x = made(kind)
    tensors = drawn(adapted, "LoRA")
    adapted.install({"layer": LoRA(0.7)}, tensors, frozenset())
    adapted.set_dropout(lambda x, layer: torch.zeros_like(x))
    assert close(adapted.model(x), plain(x))


def test_words_are_not_dropped() -> None:
    adapted, _, x = made("embedding")
    adapted.install({"layer": LoRA(0.7)}, drawn(adapted, "LoRA"), frozenset())
    before = adapted.model(x)
    adapted.set_dropout(lambda x, layer: x * 0)
    assert torch.equal(adapted.model(x), before)
