"""Options of a method in a config."""

from __future__ import annotations

import pytest

from fedspan.config import parse_config
from fedspan.errors import FedspanError
from fedspan.methods.registry import METHODS
from helpers.valid_config import SPEC, VALID


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
