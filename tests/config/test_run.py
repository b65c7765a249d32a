"""What follows from several sections of a run's config together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fedspan.config import parse_config
from fedspan.config.federation import FederationConfig
from fedspan.config.run import RunConfig
from fedspan.core.values import LayerSpec, Spec
from fedspan.errors import FedspanError
from fedspan.federation.settings import BufferedSettings


def config(**changes: Any) -> RunConfig:
    return parse_config({"data": {"train": "train.csv"}, **changes})


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "lda"),
        ({"model": {"head_init": "class-means"}}, "class-means"),
        ({"model": {"head_init": "random"}}, None),
        ({"model": {"pretrained": False}}, None),
        ({"task": "causal-lm"}, None),
        ({"task": "regression"}, "least-squares"),
    ],
)
def test_the_head_starts_by_task_and_model(changes: dict[str, Any], kind: str | None) -> None:
    found, reason = config(**changes).head_kind
    assert found == kind
    assert reason is None


def test_auto_names_the_reason_if_it_does_without_statistics() -> None:
    found, reason = config(federation={"reduction": "median"}).head_kind
    assert (found, reason) == (None, "federation.reduction: median does not apply to statistics")
    asked = config(model={"head_init": "class-means"}).head_kind
    assert asked == ("class-means", None)


@pytest.mark.parametrize(
    ("changes", "workers"),
    [
        ({}, 1),
        ({"cluster": {"workers": 8}, "partition": {"clients": 5}}, 5),
        ({"cluster": {"workers": 8}, "partition": {"clients": 50}}, 8),
        ({"cluster": {"workers": 8}, "federation": {"clients_per_round": 3}}, 3),
        ({"cluster": {"workers": 8}, "partition": {"partitioner": "natural", "column": "site"}}, 8),
    ],
)
def test_a_round_occupies_no_more_workers_than_it_has_clients(changes: dict[str, Any], workers: int) -> None:
    assert config(engine={"name": "loop"}, **changes).active_workers == workers


def test_a_simulation_has_rules_if_its_config_asks_for_any() -> None:
    assert config().build_simulation_rules() is None
    rules = FederationConfig().build_reply_rules()
    assert config(federation={"secure": {}, "weights": "uniform"}).build_simulation_rules() == rules
    assert config(simulation={}).build_simulation_rules() == rules
    assert config(simulation={"validation": False}).build_simulation_rules() == replace(rules, validate=False)
    assert config(federation={"min_replies": 2}).build_simulation_rules() == replace(rules, min_replies=2)


def test_the_partition_has_the_run_s_seed_or_its_own() -> None:
    assert config(seed=5).data_seed == 5
    assert config(seed=5, partition={"seed": 0}).data_seed == 0


def test_asynchronous_rounds_of_a_simulation_need_speeds() -> None:
    rounds = {"clients_per_round": 2, "buffered": {"concurrency": 3}}
    timed = config(federation=rounds, simulation={"speed": {}})
    timed.require_simulated()
    assert timed.build_round_settings().buffered == BufferedSettings(3)
    with pytest.raises(FedspanError, match=r"Set simulation\.speed, or replay"):
        config(federation=rounds).require_simulated()


def test_a_rank_that_no_layer_has_room_for_is_refused_by_methods_of_low_rank() -> None:
    spec = Spec((LayerSpec("wide", 4, 9), LayerSpec("tall", 9, 6)))
    assert config(method={"name": "fedit", "r": 4}).build_method(spec).get_rank(None) == 4
    with pytest.raises(FedspanError, match=r"5 is larger than a target layer: .*wide") as caught:
        config(method={"name": "fedit", "r": 5}).build_method(spec)
    assert caught.value.field == "method.r"
    assert config(method={"name": "fedavg"}).build_method(spec).spec is spec
