"""The settings of the engine, and those of its cache of hidden states."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from fedspan.config.engine import EngineConfig
from fedspan.training.jobs import PrefixSettings


def test_the_cache_gets_its_bytes_its_folder_and_the_batch_size() -> None:
    assert EngineConfig().build_prefix_settings(64) == PrefixSettings(2 * 2**30, None, 64)
    config = EngineConfig(prefix_memory=0.5, prefix_folder="some/disk")
    assert config.build_prefix_settings(3) == PrefixSettings(2**29, Path("some/disk"), 3)
    assert EngineConfig(prefix_memory=0).build_prefix_settings(3) == PrefixSettings(0, None, 3)
    assert EngineConfig(prefix_cache=False, prefix_folder="some/disk").build_prefix_settings(3) is None


@pytest.mark.parametrize(
    "values",
    [
        {"name": "flower"},
        {"clients_per_pass": 0},
        {"workers": 1025},
        {"prefix_memory": -1},
        {"prefix_memory": float("inf")},
        {"prefix_folder": ""},
    ],
)
def test_what_no_engine_has_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(values))):
        EngineConfig.model_validate(values)
