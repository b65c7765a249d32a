"""Heads of models: which layer it is, its names, the features that enter it, and how they are pooled."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from fedspan.models.adapted import AdaptedModel
from fedspan.models.head import (
    FeatureTap,
    NoOutputLayer,
    OutputLayer,
    find_frozen_heads,
    find_output_layer,
    find_untrained_head,
)
from fedspan.models.heads import HEADS, Head, get_head
from fedspan.models.pooling import Pooling


class Classifier(nn.Module):
    """A body of one layer with a pooler, and a head of two; every token has outputs if asked to."""

    base_model_prefix = "body"

    def __init__(self, labels: int = 3, tokens: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body = nn.ModuleDict({"layer": nn.Linear(5, 4), "pooler": nn.Linear(4, 6)})
        self.dense, self.out = nn.Linear(6, 7), nn.Linear(7, labels)
        self.config = SimpleNamespace(num_labels=labels)
        self.tokens = tokens

    def forward(self, x: Tensor) -> Tensor:
        features = torch.tanh(self.dense(self.body["pooler"](self.body["layer"](x))))
        outputs = self.out(features)
        return outputs[torch.arange(len(x)), torch.arange(len(x)) % x.shape[1]] if self.tokens else outputs


def adapted(model: nn.Module, *extras: str) -> AdaptedModel:
    parameters = dict(model.named_parameters())
    chosen = {name: parameters[name] for name in extras}
    return AdaptedModel(model, {"body.layer": model.get_submodule("body.layer")}, chosen)


HEAD = ("dense.weight", "dense.bias", "out.weight", "out.bias")


def test_the_output_layer_has_the_outputs_of_the_labels_and_trains() -> None:
    assert find_output_layer(adapted(Classifier(), *HEAD)) == OutputLayer("out", 3, 7, True)
    bare = Classifier()
    bare.out = nn.Linear(7, 3, bias=False)
    assert find_output_layer(adapted(bare, *HEAD[:3])) == OutputLayer("out", 3, 7, False)


@pytest.mark.parametrize(
    ("labels", "extras", "why"),
    [
        (3, HEAD[:2], "0 linear layers of its head have 3 outputs"),  # it does not train
        (7, HEAD, "2 linear layers of its head have 7 outputs"),
    ],
)
def test_no_or_several_such_layers_are_an_error(labels: int, extras: tuple[str, ...], why: str) -> None:
    model = adapted(Classifier(labels), *extras)
    with pytest.raises(NoOutputLayer, match=why):
        find_output_layer(model)
    assert find_untrained_head(model) == ()


def test_a_bias_of_zeros_looks_untrained() -> None:
    model = Classifier()
    assert find_untrained_head(adapted(model, *HEAD)) == ()
    with torch.no_grad():
        model.out.bias.zero_()
    assert find_untrained_head(adapted(model, *HEAD)) == ("out",)
    with torch.no_grad():
        model.out.bias[2] = 1e-9
    assert find_untrained_head(adapted(model, *HEAD)) == ()


def test_untrained_layers_that_do_not_train_are_found() -> None:
    """Behind the body, or in one whose other layers were trained; not those that train or are targets."""
    model = Classifier()
    with torch.no_grad():
        for layer in (model.out, model.dense, model.body["pooler"]):
            layer.bias.zero_()
    assert find_frozen_heads(adapted(model, *HEAD)) == ("body.pooler",)
    assert find_frozen_heads(adapted(model, *HEAD[2:])) == ("body.pooler", "dense")
    with torch.no_grad():
        model.body["layer"].bias.zero_()
    assert find_frozen_heads(adapted(model, *HEAD[2:])) == ("dense",)  # a whole body without a trained bias
    model.base_model_prefix = ""
    assert find_frozen_heads(adapted(model, *HEAD[2:])) == ()


@pytest.mark.parametrize("tokens", [False, True])
def test_features_are_the_input_of_the_layer_for_the_token_that_was_selected(tokens: bool) -> None:
    model, layer = Classifier(tokens=tokens), OutputLayer("out", 3, 7, True)
    tap, x = FeatureTap(model, layer), torch.randn(4, 2, 5) if tokens else torch.randn(4, 5)
    with tap.record(), torch.no_grad():
        logits = model(x)
        features = tap.take(logits)
    assert features.shape == (4, 7)
    assert torch.allclose(model.out(features), logits, atol=1e-6)
    model(x)
    with pytest.raises(NoOutputLayer, match="out is not called"):
        tap.take(logits)


def test_logits_that_are_not_the_layer_s_outputs_are_an_error() -> None:
    """Scaled, or of fewer rows than the layer was given."""
    model = Classifier()
    tap = FeatureTap(model, find_output_layer(adapted(model, *HEAD)))
    with tap.record(), torch.no_grad():
        logits = model(torch.randn(4, 5))
        for wrong in (2 * logits, logits[:3]):
            with pytest.raises(NoOutputLayer, match="its logits are not the outputs of out"):
                tap.take(wrong)


MAPPINGS = {
    "AutoModelForSequenceClassification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForTokenClassification": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForImageClassification": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForMaskedLM": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
}


@pytest.mark.parametrize("name", [name for name, head in HEADS.items() if head.auto_class in MAPPINGS])
def test_model_classes_of_a_head_end_as_it_says(name: str) -> None:
    """Those of BERT, or of ViT where images are read."""
    head = get_head(name)
    kind = MAPPINGS[head.auto_class]["vit" if head.has_image_inputs else "bert"]
    assert kind.endswith(head.suffixes)


def test_a_head_of_one_s_own_is_itself_and_an_unknown_name_is_none() -> None:
    own = Head("AutoModelForMultipleChoice", ("ForMultipleChoice",))
    assert get_head(own) is own
    assert own.load_class() is transformers.AutoModelForMultipleChoice
    with pytest.raises(KeyError, match="classifier"):
        get_head("classifier")


HIDDEN = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("mode", ["mean", "max", "cls", "last"])
def test_padding_does_not_matter(mode: Any) -> None:
    hidden = HIDDEN[:1]
    padded = torch.cat([hidden, torch.full((1, 2, 4), torch.nan)], 1)
    mask = torch.tensor([[1, 1, 1, 0, 0]])
    torch.testing.assert_close(Pooling(mode)(padded, mask), Pooling(mode)(hidden, None))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("mode", ["mean", "max", "cls", "last"])
def test_each_text_is_pooled_over_its_own_tokens(mode: Any, normalize: bool) -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    pooled = Pooling(mode, normalize)(HIDDEN, mask)
    for text, length, vector in zip(HIDDEN, (2, 3), pooled, strict=True):
        tokens = text[:length]
        expected = {"mean": tokens.mean(0), "max": tokens.max(0).values, "cls": tokens[0], "last": tokens[-1]}[mode]
        torch.testing.assert_close(vector, expected / expected.norm() if normalize else expected)
