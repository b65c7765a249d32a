"""Models without weights."""

from __future__ import annotations

from fedspan.models.empty import load_empty
from fedspan.models.targets import suggest_targets


def test_targets_are_suggested_where_peft_has_no_default() -> None:
    empty = load_empty("builtin:resnet-8", "image-classification", ["a", "b", "c"])
    assert suggest_targets(empty, 3) == ["conv1", "conv2"]
    known = load_empty("any", "classification", ["a", "b", "c"], architecture={"model_type": "bert"})
    assert suggest_targets(known, 3) is None
    vit = {"model_type": "dinov2", "num_hidden_layers": 1}
    names = suggest_targets(load_empty("any", "image-classification", ["a", "b", "c"], architecture=vit), 3)
    assert names == ["q_proj", "v_proj"]
