"""The model section: which options fit together, and which models begin from scratch."""

from __future__ import annotations

from typing import Any

import pytest

from fedspan.config.model import ModelConfig
from fedspan.errors import FedspanError


@pytest.mark.parametrize(
    ("values", "field", "why"),
    [
        ({"pooling_normalize": True}, "pooling_normalize", "it needs model.pooling: mean, max, cls or last"),
        ({"pooling_normalize": False, "pooling": "stock"}, "pooling_normalize", "it needs model.pooling"),
        ({"max_memory": {"cpu": 1.0}}, "max_memory", "it needs model.device_map: auto"),
        ({"device_map": "auto", "quantization": "nf4"}, "device_map", "whose base is not offloaded"),
        ({"pretrained": False, "quantization": "int8"}, "quantization", "its weights are not pretrained"),
        ({"pretrained": False, "device_map": "auto"}, "device_map", "have to be on the device"),
        ({"pretrained": False, "adapter": "a"}, "adapter", "an adapter belongs to pretrained weights"),
        ({"name": "builtin:resnet-8", "modules_to_save": ["fc"]}, "modules_to_save", "trains anyway"),
    ],
)
def test_options_that_do_not_fit_are_refused_with_the_reason(values: dict[str, Any], field: str, why: str) -> None:
    with pytest.raises(FedspanError, match=why) as caught:
        ModelConfig.model_validate(values)
    assert caught.value.field == f"model.{field}"


@pytest.mark.parametrize(
    "values",
    [
        {"pooling": "mean", "pooling_normalize": True},
        {"device_map": "auto", "max_memory": {"device": 2.0, "cpu": 1.0}},
        {"quantization": "nf4", "adapter": "a", "modules_to_save": ["fc"]},
    ],
)
def test_options_that_fit_are_kept(values: dict[str, Any]) -> None:
    config = ModelConfig.model_validate(values)
    assert {name: getattr(config, name) for name in values} == values


def test_models_from_scratch_are_those_without_pretrained_weights() -> None:
    assert not ModelConfig().is_from_scratch
    assert ModelConfig(pretrained=False).is_from_scratch
    assert all(ModelConfig(name=f"builtin:resnet-{layers}").is_from_scratch for layers in (8, 10, 18))
    assert not ModelConfig(name="microsoft/resnet-18").is_from_scratch
