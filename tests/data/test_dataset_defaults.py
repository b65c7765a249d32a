"""What a known data set says of itself."""

from __future__ import annotations

from fedspan.data import DataConfig
from fedspan.data.dataset_defaults import fill_data_defaults


def test_a_config_without_a_data_set_is_left_alone() -> None:
    config = DataConfig(train="x.csv", text="body")
    assert fill_data_defaults(config) is config
