"""Settings of training in a config."""

from __future__ import annotations

import pytest

from fedspan.config import parse_config
from fedspan.errors import FedspanError
from helpers.valid_config import VALID


def test_a_schedule_falls_and_does_not_rise() -> None:
    with pytest.raises(
        FedspanError, match=r"^`training.min_lr`: 0.5 is not accepted\. Expected .*at most training.lr, 0.01"
    ):
        parse_config({**VALID, "training": {"lr": 0.01, "min_lr": 0.5}})
