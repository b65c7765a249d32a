"""What a search tries."""

from __future__ import annotations

from pathlib import Path

from fedspan.experiments.search import plan_sweep
from helpers.searched_settings import values_of


def test_a_grid_has_all_combinations(tiny_folder: Path) -> None:
    over = {"training.lr": "1e-3,2e-2", "method.r": [1, 2, 3]}
    plan = plan_sweep(values_of(tiny_folder), over, None, None, [8, 9])
    assert list(plan.values) == [{"training.lr": lr, "method.r": r} for lr in ("1e-3", "2e-2") for r in (1, 2, 3)]
    assert [step.group for step in plan.steps] == [str(number) for number in range(1, 7) for _ in (8, 9)]
    configs = [step.config for step in plan.steps if step.seed == 9]
    assert [(one.training.lr, one.method.options["r"]) for one in configs] == [
        (lr, r) for lr in (0.001, 0.02) for r in (1, 2, 3)
    ]
    assert {one.federation.rounds for one in configs} == {3}
    assert configs[3].method.options == {"r": 1, "lora_alpha": 4}


def test_rounds_that_are_tried_are_those_of_the_trial(tiny_folder: Path) -> None:
    plan = plan_sweep(values_of(tiny_folder), {"federation.rounds": "1,2"}, None, 7, [0])
    assert [step.config.federation.rounds for step in plan.steps] == [1, 2]
    assert [config.federation.rounds for config in plan.configs] == [1, 2]


def test_an_option_of_a_wrapper_can_be_swept(tiny_folder: Path) -> None:
    values = values_of(tiny_folder)
    values["method"] = {**values["method"], "wrappers": [{"name": "fedprox"}]}
    plan = plan_sweep(values, {"method.wrappers.0.mu": "0.1,1"}, None, None, [0])
    assert [config.method.wrappers[0].options for config in plan.configs] == [{"mu": 0.1}, {"mu": 1}]
