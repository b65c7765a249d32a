"""The aggregation that a config selects, and the norm to which a secure sum clips."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from fedspan.config import parse_config
from fedspan.errors import FedspanError
from fedspan.federation.aggregation.plaintext import PlaintextAggregation
from fedspan.federation.settings import SecureSettings
from fedspan.runs import aggregation_setup
from fedspan.runs.aggregation_setup import build_aggregation


def build(clip: float | None = None, **federation: Any) -> Any:
    return build_aggregation(parse_config({"data": {"train": "train.csv"}, "federation": federation}), clip)


def test_replies_are_plain_unless_the_config_says_otherwise() -> None:
    assert build() is PlaintextAggregation
    assert build(3.0, reduction="median") is PlaintextAggregation


def test_a_secure_sum_has_the_settings_of_the_config_and_its_clip_or_another() -> None:
    secure = pytest.importorskip("fedspan.federation.aggregation.secure")
    values = {"secure": {"clip": 7.0, "bits": 64, "neighbors": 4}, "weights": "uniform"}
    for clip, expected in ((None, 7.0), (3.0, 3.0)):
        found = build(clip, **values)
        assert isinstance(found, partial)
        assert found.func is secure.SecureAggregation
        assert found.keywords == {"secure": SecureSettings(expected, 64, neighbors=4)}


def test_missing_libraries_are_named_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise FedspanError("federation.secure", {}, problem="not installed")

    monkeypatch.setattr(aggregation_setup, "require_packages", refuse)
    assert build() is PlaintextAggregation
    with pytest.raises(FedspanError, match="not installed"):
        build(secure={}, weights="uniform")
