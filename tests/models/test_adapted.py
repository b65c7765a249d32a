"""The replaced forward: PEFT's own numbers, in every number format, and nothing written into the weights of record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fedspan.core.base import BaseUpdate, Increment
from fedspan.core.lowrank import LowRank
from fedspan.core.parametrization import Dense, Factorized, LoRA, Parametrization
from fedspan.core.tensors import join_extra_name, join_tensor_name
from fedspan.errors import FedspanError
from fedspan.models.adapted import AdaptedModel
from fedspan.models.targets import find_extras
from helpers import tiny

TARGETS = {"bert": tiny.BERT, "gpt2": tiny.GPT2}
BATCH = {
    "input_ids": torch.tensor([[2, 7, 21, 40, 4], [2, 9, 3, 3, 3]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
}
both_kinds = pytest.mark.parametrize("kind", TARGETS)


def adapt(model: nn.Module, kind: str) -> AdaptedModel:
    names = tuple(TARGETS[kind])
    targets = {name: module for name, module in model.named_modules() if name.endswith(names)}
    return AdaptedModel(model, targets, find_extras(model, ["score" if kind == "gpt2" else "classifier"]))


def random_pairs(adapted: AdaptedModel, seed: int = 1) -> dict[str, LowRank]:
    """By layer, of rank 3."""
    rng = torch.Generator().manual_seed(seed)
    return {
        layer.name: LowRank(
            0.3 * torch.randn(layer.out_features, 3, generator=rng),
            0.3 * torch.randn(3, layer.in_features, generator=rng),
        )
        for layer in adapted.spec.layers
    }


def install(adapted: AdaptedModel, how: Parametrization, **slots: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One parametrization for all layers, slots given as ``A={layer: tensor}``."""
    tensors = {
        join_tensor_name(layer, slot): value for slot, by_layer in slots.items() for layer, value in by_layer.items()
    }
    return adapted.install(dict.fromkeys(adapted.layers, how), tensors, frozenset(tensors))


def install_pairs(adapted: AdaptedModel, pairs: Mapping[str, LowRank], scaling: float) -> dict[str, Tensor]:
    factors = {slot: {layer: getattr(pair, slot) for layer, pair in pairs.items()} for slot in ("A", "B")}
    return install(adapted, LoRA(scaling), **factors)


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(**BATCH).logits.float()


def distance(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max())


def with_weights(kind: str, folder: Path, change: Callable[[str, Tensor], Tensor], like: nn.Module) -> nn.Module:
    """The plain model with ``change(layer, W (O, I))`` as target weights and another model's head."""
    model = tiny.fresh_classifier(folder / kind)
    model.load_state_dict(like.state_dict())
    for name, layer in adapt(tiny.fresh_classifier(folder / kind), kind).layers.items():
        parameter = model.get_parameter(f"{name}.weight")
        weight = layer.get_original()
        parameter.data.copy_(layer.operator.to_stored(change(name, weight)))
    return model


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@both_kinds
def test_the_forward_is_peft_s(kind: str, dtype: torch.dtype, tiny_folder: Path) -> None:
    """The same float32 factors on a base in either format.

    bfloat16 has 8 bits, and PEFT rounds the sum of base and product once where we round both: 0.05 is a few roundings
    of logits of order 2, which the factors move by more than 0.3.
    """
    model = tiny.fresh_classifier(tiny_folder / kind, dtype=dtype)
    before, adapted = logits(model), adapt(model, kind)
    pairs = random_pairs(adapted)
    install_pairs(adapted, pairs, 2.0)
    lora = LoraConfig(r=3, lora_alpha=6, target_modules=TARGETS[kind], task_type="SEQ_CLS")
    peft = get_peft_model(tiny.fresh_classifier(tiny_folder / kind, dtype=dtype), lora).eval()
    with torch.no_grad():
        for layer, pair in pairs.items():
            peft.get_parameter(f"base_model.model.{layer}.lora_A.default.weight").copy_(pair.A)
            peft.get_parameter(f"base_model.model.{layer}.lora_B.default.weight").copy_(pair.B)
        for path, value in adapted.extras.items():
            module, _, slot = path.rpartition(".")
            peft.get_parameter(f"base_model.model.{module}.modules_to_save.default.{slot}").copy_(value)
    assert distance(logits(model), logits(peft)) < (1e-6 if dtype == torch.float32 else 0.05)
    assert distance(logits(model), before) > 0.3


@both_kinds
def test_base_updates_never_touch_a_narrow_weight(kind: str, tiny_folder: Path) -> None:
    """They stand beside it in float32: bit for bit what the same factors do as an adapter."""
    model = tiny.fresh_classifier(tiny_folder / kind, dtype=torch.bfloat16)
    adapted = adapt(model, kind)
    pairs, stored = random_pairs(adapted), {name: value.clone() for name, value in model.state_dict().items()}
    zeros = {name: LowRank(torch.zeros_like(pair.B), pair.A) for name, pair in pairs.items()}
    install_pairs(adapted, pairs, 1.0)
    expected = logits(model)
    adapted.set_base(BaseUpdate().add(Increment(1, pairs)))
    install_pairs(adapted, zeros, 1.0)
    assert torch.equal(logits(model), expected)
    assert all(torch.equal(value, stored[name]) for name, value in model.state_dict().items())
    adapted.set_base(BaseUpdate())
    assert distance(logits(model), expected) > 0.3
    with pytest.raises(FedspanError, match="float32, because this method scales the base"):
        adapted.set_base(BaseUpdate().add(Increment(1, {}, decay=0.9)))


@both_kinds
def test_a_base_update_replaces_the_weight_and_W0_comes_back(kind: str, tiny_folder: Path) -> None:
    model = tiny.fresh_classifier(tiny_folder / kind)
    adapted = adapt(model, kind)
    first, second = random_pairs(adapted, 1), random_pairs(adapted, 2)
    stored = {name: value.clone() for name, value in model.state_dict().items()}
    originals = {name: adapted.get_weight(name) for name in adapted.layers}
    base = BaseUpdate().add(Increment(1, first)).add(Increment(2, second, decay=0.9))
    adapted.set_base(base)
    plain = with_weights(
        kind, tiny_folder, lambda name, W: 0.9 * (W + first[name].to_dense()) + second[name].to_dense(), like=model
    )
    assert distance(logits(model), logits(plain)) < 1e-5
    assert all(torch.equal(adapted.get_weight(name), original) for name, original in originals.items())
    adapted.set_base(BaseUpdate())
    assert all(torch.equal(value, stored[name]) for name, value in model.state_dict().items())


@both_kinds
def test_whole_weights_and_factors_without_a_base(kind: str, tiny_folder: Path) -> None:
    """``Dense`` and ``Factorized``, in either storage order and with the layer's own bias."""
    model = tiny.fresh_classifier(tiny_folder / kind)
    adapted = adapt(model, kind)
    pairs = random_pairs(adapted)
    factors = {"U": {name: pair.B for name, pair in pairs.items()}, "V": {name: pair.A for name, pair in pairs.items()}}
    plain = with_weights(kind, tiny_folder, lambda name, W: pairs[name].to_dense(), like=model)
    install(adapted, Dense(), W={name: pair.to_dense() for name, pair in pairs.items()})
    assert distance(logits(model), logits(plain)) < 1e-5
    install(adapted, Factorized(), **factors)
    assert distance(logits(model), logits(plain)) < 1e-5


@both_kinds
def test_captured_gradients_are_those_of_the_whole_weight(kind: str, tiny_folder: Path) -> None:
    model = tiny.fresh_classifier(tiny_folder / kind)
    adapted = adapt(model, kind)
    pairs = random_pairs(adapted)
    install_pairs(adapted, pairs, 1.0)
    found: dict[str, list[LowRank]] = {name: [] for name in adapted.layers}
    with adapted.capture_gradients(lambda name, gradient: found[name].append(gradient)):
        model(**BATCH).logits.square().sum().backward()
    model(**BATCH).logits.square().sum().backward()  # outside of the context nothing is captured
    plain = with_weights(kind, tiny_folder, lambda name, W: W + pairs[name].to_dense(), like=model)
    plain(**BATCH).logits.square().sum().backward()
    for name, layer in adapted.layers.items():
        gradient = plain.get_parameter(f"{name}.weight").grad
        assert gradient is not None
        expected = layer.operator.to_matrix(gradient)
        (captured,) = found[name]
        assert distance(captured.to_dense(), expected) < 1e-5 * float(expected.abs().max())


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_layer_used_twice_has_one_gradient(recomputed: bool) -> None:
    """The sum over its uses; also where activations are computed again in the backward pass."""
    linear = torch.nn.Linear(5, 4)

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = linear

        def forward(self, x: Tensor) -> Tensor:
            def once(x: Tensor) -> Tensor:
                return torch.tanh(self.shared(x))

            for number in range(2):
                x = checkpoint(once, x, use_reentrant=False) if recomputed else once(x)
                x = torch.cat([x, x[:, :1]], 1) if number == 0 else x
            return x

    model, x = Twice(), torch.randn(3, 5)
    loss = model(x).square().sum()
    (expected,) = torch.autograd.grad(loss, linear.weight)
    adapted = AdaptedModel(model, {"shared": linear}, {})
    slots = {"shared/A": torch.zeros(1, 5), "shared/B": torch.zeros(4, 1)}
    adapted.install({"shared": LoRA(1.0)}, slots, frozenset(slots))
    found: list[LowRank] = []
    with adapted.capture_gradients(lambda name, gradient: found.append(gradient)):
        model(x).square().sum().backward()
    assert torch.allclose(torch.stack([gradient.to_dense() for gradient in found]).sum(0), expected, atol=1e-6)
    assert len(found) == 1


def test_what_is_installed_is_a_copy_and_extras_fall_back_to_what_was_loaded(tiny_folder: Path) -> None:
    model = tiny.fresh_classifier(tiny_folder / "bert")
    adapted = adapt(model, "bert")
    pairs = random_pairs(adapted)
    before = {name: pair.A.clone() for name, pair in pairs.items()}
    live = install_pairs(adapted, pairs, 1.0)
    with torch.no_grad():
        for value in live.values():
            assert value.requires_grad
            value.fill_(7.0)
    assert all(torch.equal(pair.A, before[name]) for name, pair in pairs.items())
    name, loaded = join_extra_name("classifier.bias"), adapted.get_extra("classifier.bias")
    live = adapted.install({}, {name: torch.ones(4)}, frozenset([name]))
    assert live[name] is model.get_parameter("classifier.bias")
    assert torch.equal(live[name].detach(), torch.ones(4))
    adapted.install({}, {}, frozenset())
    assert torch.equal(model.get_parameter("classifier.bias"), loaded)
    assert not any(parameter.requires_grad for parameter in model.parameters())
