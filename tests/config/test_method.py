"""Options of a method in a config."""

from __future__ import annotations

import pytest

from fedspan.config import parse_config
from fedspan.errors import FedspanError
from fedspan.methods.registry import METHODS
from helpers.valid_config import SPEC, VALID, refused


def test_a_method_gets_its_options_and_the_run_s_seed() -> None:
    method = parse_config(VALID).build_method(SPEC)
    assert method == METHODS["fedloru"](spec=SPEC, seed=3, r=4, lora_alpha=8.0, tau=2)  # type: ignore[call-arg]


def test_a_rank_larger_than_a_layer_is_refused() -> None:
    """Except where there is no rank: FedAvg trains whole weights."""
    config = parse_config({**VALID, "method": {"name": "fedit", "r": 6}})
    with pytest.raises(FedspanError, match="tall is 30 x 5: at most 5") as caught:
        config.build_method(SPEC)
    assert (caught.value.field, caught.value.value) == ("method.r", 6)
    assert parse_config({**VALID, "method": {"name": "fedavg", "r": 6}}).build_method(SPEC)


def test_method_options_have_types_and_ranges() -> None:
    refused({"method.r": "four"}, "method.r", "four", "integer")
    refused({"method.r": 0}, "method.r", 0, "a finite number above 0")
    refused({"method.tau": 2.5}, "method.tau", 2.5, "integer")
    refused({"method.lora_alpha": -1}, "method.lora_alpha", -1.0, "a finite number above 0")
    refused({"method.use_rslora": "maybe"}, "method.use_rslora", "maybe", "boolean")
    method = {"name": "ffa-lora", "init_A": "random"}
    refused({"method": method}, "method.init_A", "random", "'kaiming', 'gaussian' or 'orthonormal'")
