"""The heads of models: each loads a class of Transformers, whose models have names with its ends."""

from __future__ import annotations

import pytest
import transformers
from transformers.models.auto import modeling_auto

from fedspan.models.heads import HEADS, Head, get_head

MAPPINGS = {
    "AutoModelForSequenceClassification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForTokenClassification": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForImageClassification": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForMaskedLM": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_loads_its_class(name: str) -> None:
    head = get_head(name)
    assert head is HEADS[name]
    assert head.load_class() is getattr(transformers, head.auto_class)
    assert hasattr(head.load_class(), "from_pretrained")


@pytest.mark.parametrize("name", [name for name, head in HEADS.items() if head.auto_class in MAPPINGS])
def test_model_classes_of_a_head_end_as_it_says(name: str) -> None:
    """Those of BERT, or of ViT where images are read."""
    head = get_head(name)
    kind = MAPPINGS[head.auto_class]["vit" if head.has_image_inputs else "bert"]
    assert kind.endswith(head.suffixes)


@pytest.mark.parametrize(
    ("name", "kind", "labels"),
    [
        ("classification", None, 3),
        ("multi-label", "multi_label_classification", 3),
        ("regression", "regression", 1),
    ],
)
def test_outputs_and_problems_of_a_classifier(name: str, kind: str | None, labels: int) -> None:
    """Transformers chooses its loss by the type of problem."""
    head = get_head(name)
    assert head.problem_type == kind
    assert head.outputs == ("number" if labels == 1 else "labels")
    config = transformers.BertConfig(
        vocab_size=9,
        hidden_size=8,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=labels,
        problem_type=head.problem_type,
    )
    assert head.load_class().from_config(config).classifier.weight.shape == (labels, 8)


def test_only_heads_that_no_pretrained_model_has_are_new() -> None:
    old = {name for name, head in HEADS.items() if not head.is_new}
    assert old == {"language-model", "masked-language-model", "sequence-to-sequence", "encoder"}
    assert all(HEADS[name].outputs is None for name in old)


def test_a_head_of_one_s_own_is_itself_and_an_unknown_name_is_none() -> None:
    own = Head("AutoModelForMultipleChoice", ("ForMultipleChoice",))
    assert get_head(own) is own
    assert own.load_class() is transformers.AutoModelForMultipleChoice
    with pytest.raises(KeyError, match="classifier"):
        get_head("classifier")
