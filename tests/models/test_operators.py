"""Which modules can be targets, and the shapes and kernels of their weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fedspan.errors import FedspanError
from fedspan.models.adapted import AdaptedModel
from fedspan.models.operators import Convolution, Linear, Lookup, build_operator, explain_unfit
from fedspan.models.targets import find_targets
from helpers.layer_kinds import MODULES, Whole, of_each_fit

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


def test_shapes_and_kernels() -> None:
    """As in PEFT, a convolution is its unfolded weight and an embedding (dimension, vocabulary)."""
    conv, table = nn.Conv2d(3, 5, (2, 4)), nn.Embedding(7, 4)
    found = [
        (type(one), one.shape, one.kernel) for one in map(build_operator, (nn.Linear(5, 3), Conv1D(6, 4), conv, table))
    ]
    assert found == [
        (Linear, (3, 5), (1, 1)),
        (Linear, (6, 4), (1, 1)),
        (Convolution, (5, 24), (2, 4)),
        (Lookup, (4, 7), (1, 1)),
    ]
    adapted = AdaptedModel(Whole(conv), {"layer": conv}, {})
    (layer,) = adapted.spec.layers
    assert (layer.shape, layer.kernel) == ((5, 24), (2, 4))
    assert torch.equal(adapted.get_weight("layer")[:, 8:16], conv.weight[:, 1].flatten(1))


class Scaled(nn.Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Standardized(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight - self.weight.mean(), self.bias)


UNFIT: Mapping[str, tuple[nn.Module, str]] = {
    "groups": (nn.Conv2d(4, 6, 3, groups=2), "a convolution in 2 groups"),
    "dilated": (
        nn.Conv2d(2, 3, (1, 3), dilation=(1, 2)),
        "is a dilated convolution, for which PEFT cannot express an adapter",
    ),
    "padding": (nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), "pads with reflect"),
    "standardized": (Standardized(2, 3, 3), "is a Standardized, which does more than convolve"),
    "max_norm": (nn.Embedding(5, 3, max_norm=1.0), "scales what it looks up"),
    "frequency": (nn.Embedding(5, 3, scale_grad_by_freq=True), "scales what it looks up"),
    "subclass": (Scaled(5, 3), "scales what it looks up"),
    "attention": (nn.MultiheadAttention(6, 2).out_proj, "is the output projection of an nn.MultiheadAttention"),
    "other": (
        nn.Conv3d(2, 3, 1),
        "is a Conv3d, which cannot be a target. Targets are nn.Linear, Conv1D, nn.Conv2d and nn.Embedding",
    ),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_layers_that_compute_something_else_are_refused(kind: str) -> None:
    module, words = UNFIT[kind]
    assert words in (explain_unfit(module) or "")
    with pytest.raises(FedspanError) as caught:
        find_targets(Whole(module), LoraConfig(target_modules=["layer"]))
    assert (caught.value.field, caught.value.value) == ("model.target_modules", "layer")
    assert words in str(caught.value)


@of_each_fit
def test_these_are_fit(kind: str) -> None:
    assert explain_unfit(MODULES[kind][0]()) is None


@pytest.mark.parametrize("target", ["embedding", "head"])
def test_a_shared_weight_is_no_target(target: str) -> None:
    """An update of one of the two would part them, and a merged model could not hold both."""
    model: Any = nn.ModuleDict({"embedding": nn.Embedding(7, 4), "head": nn.Linear(4, 7, bias=False)})
    model["head"].weight = model["embedding"].weight
    other = {"embedding": "head", "head": "embedding"}[target]
    with pytest.raises(FedspanError, match=f"shares its weight with {other}") as caught:
        find_targets(model, LoraConfig(target_modules=[target]))
    assert (caught.value.field, caught.value.value) == ("model.target_modules", target)
    model["head"].weight = nn.Parameter(torch.zeros(7, 4))
    assert list(find_targets(model, LoraConfig(target_modules=[target]))) == [target]
