"""Metrics that a task registers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedspan import FedspanError
from fedspan.tasks.metrics import METRICS, Metric
from fedspan.tasks.registry import register_task
from helpers.sharpened_task import OWN


def test_a_task_changes_only_the_metrics_that_it_registered() -> None:
    narrow, wide = ({"own_metric": Metric("own", True, maximum=maximum)} for maximum in (1.0, 9.0))
    owner = replace(OWN, name="owner", metrics=("own_metric",), custom_metrics=narrow)
    register_task(owner)
    register_task(replace(owner, name="other"))  # the same metric in another task
    with pytest.raises(FedspanError, match="'own_metric' is already the name of another metric"):
        register_task(replace(owner, name="other", custom_metrics=wide))
    register_task(replace(owner, custom_metrics=wide))
    assert METRICS["own_metric"] == wide["own_metric"]
    with pytest.raises(FedspanError, match="'loss' is already the name of another metric"):
        register_task(replace(owner, custom_metrics=wide | {"loss": Metric("x", True)}))


def test_metrics_are_registered_together_or_not_at_all() -> None:
    taken = {"first": Metric("first", True), "loss": Metric("x", True)}
    with pytest.raises(FedspanError, match="'loss' is already the name of"):
        register_task(replace(OWN, metrics=("first",), custom_metrics=taken))
    assert "first" not in METRICS
