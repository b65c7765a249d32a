"""The replaced forward: PEFT's own numbers, in every number format, and nothing written into the weights of record."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fedspan.core.lowrank import LowRank
from fedspan.core.parametrization import LoRA, Parametrization
from fedspan.core.tensors import join_extra_name, join_tensor_name
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
