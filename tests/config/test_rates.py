"""Default rates: by task, method and optimizer, one entry for each method of the registry at most."""

from __future__ import annotations

import pytest

from fedspan.config import parse_config
from fedspan.config.rates import FACTORS, get_training_defaults
from fedspan.methods.registry import METHODS
from fedspan.tasks.registry import TASKS


def test_every_factor_belongs_to_a_method_of_the_registry() -> None:
    assert set(FACTORS) <= set(METHODS)
    assert set(FACTORS).isdisjoint({"fedit"})  # the method that the tasks' rates are those of


@pytest.mark.parametrize("task", [task for task in TASKS if task != "trainer"])
@pytest.mark.parametrize("method", METHODS)
def test_every_task_and_method_has_defaults_that_a_config_accepts(task: str, method: str) -> None:
    found = get_training_defaults(task, method)  # pyright: ignore[reportArgumentType]
    assert found.lr == pytest.approx(get_training_defaults(task, "fedit").lr * FACTORS.get(method, 1.0))  # pyright: ignore
    assert bool(found.logit_adjustment) == ("logit_adjustment" in TASKS[task].loss_options)
    training = {
        "lr": found.lr,
        "batch_size": found.batch_size,
        "local_epochs": found.local_epochs,
        "logit_adjustment": found.logit_adjustment,
    }
    federation = {"rounds": found.rounds, "early_stopping": found.early_stopping}
    config = parse_config({"task": task, "data": {"train": "x.csv"}, "training": training, "federation": federation})
    assert config.build_training_settings().optimizer.lr == found.lr


def test_whole_weights_take_smaller_rates_and_single_factors_larger_ones() -> None:
    rates = {method: get_training_defaults("sequence-classification", method).lr for method in METHODS}
    assert rates["fedavg"] < rates["fedit"] < rates["ffa-lora"]
    assert get_training_defaults("causal-lm", "fedit").lr < rates["fedit"]


def test_logits_are_adjusted_for_classifiers_only() -> None:
    values = {"task": "regression", "data": {"train": "x.csv"}, "training": {"logit_adjustment": 1.0}}
    with pytest.raises(Exception, match=r"training\.logit_adjustment.*regression has no classes"):
        parse_config(values)
    private = {"privacy": {"mechanism": "dp-sgd", "epsilon": 3.0}, "data": {"train": "x.csv"}}
    with pytest.raises(Exception, match="class counts"):
        parse_config({**private, "training": {"logit_adjustment": 1.0}})
