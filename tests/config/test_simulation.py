"""Simulated conditions as a config has them, and as the transport gets them."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from fedspan.config.simulation import SimulationConfig
from fedspan.federation.conditions import Conditions, Faults, SpeedDistribution


def test_conditions_have_the_run_s_seed_and_every_field() -> None:
    assert SimulationConfig().build_conditions(5) == Conditions(5)
    speed = {"distribution": "uniform", "median": 7.0, "spread": 3.0}
    values = {"dropout": {"a": 0.5}, "speed": speed, "faults": {"share": 0.25, "kind": "scale", "factor": 4.0}}
    found = SimulationConfig.model_validate(values).build_conditions(6)
    assert found == Conditions(6, {"a": 0.5}, SpeedDistribution("uniform", 7.0, 3.0), Faults(0.25, "scale", 4.0))


def test_rounds_count_from_1_in_a_config_and_from_0_in_the_run() -> None:
    config = SimulationConfig.model_validate({"present": {"late": [3, None], "early": [1, 2], "once": [2, 2]}})
    presence = config.build_presence()
    assert presence.spans == {"late": ((2, None),), "early": ((0, 2),), "once": ((1, 2),)}
    present = [[id for id in ("late", "early", "once") if presence.is_present(id, round)] for round in range(4)]
    assert present == [["early"], ["early", "once"], ["late"], ["late"]]
    assert SimulationConfig().build_presence().spans == {}


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"present": {"a": [3, 2]}}, r"a last round that is not before the first one \(for a: 3 and 2\)"),
        ({"present": {"a": [0, 2]}}, "greater than or equal to 1"),
        ({"dropout": 1.5}, "less than or equal to 1"),
        ({"dropout": {"a": -0.1}}, "greater than or equal to 0"),
        ({"speed": {"spread": 0.5}}, "greater than or equal to 1"),
        ({"faults": {"share": 0.0, "kind": "nan"}}, "greater than 0"),
        ({"faults": {"share": 0.5}}, "Field required"),
    ],
)
def test_what_no_simulation_has_is_refused(values: dict[str, object], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        SimulationConfig.model_validate(values)
