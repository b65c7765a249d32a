"""benchmarks/defense_costs.py: the same honest federation with and without defenses, and its rows."""

from pathlib import Path
from typing import Any

import defense_costs
import pytest
import torch

from fedspan.runs.setup import prepare
from helpers import tiny


def test_variants_take_turns_and_differ_in_defenses_alone(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    made: dict[str, Any] = {}

    def simulated(rounds: int, seed: int, **changes: Any) -> Any:
        changes["federation"] = {"rounds": rounds, "clients_per_round": None, **changes.get("federation", {})}
        prepared = prepare(tiny.config(tiny_folder, **changes))
        name = list(defense_costs.SIMULATED)[len(made)]
        made[name] = defense_costs.Variant(prepared, prepared.federation.begin(), [])
        run = prepared.federation.run_round

        def noted(progress: Any) -> Any:
            order.append(name)
            return run(progress)

        monkeypatch.setattr(prepared.federation, "run_round", noted)
        monkeypatch.setattr(made[name], "accuracy", lambda: 50.0)
        return made[name]

    monkeypatch.setattr(defense_costs, "prepare_simulation", simulated)
    rows = defense_costs.simulate(2, 0)
    off, defaults, validated = defense_costs.SIMULATED
    assert sorted(order[:3]) == sorted(defense_costs.SIMULATED)
    assert order[3:] == order[:3][::-1]
    assert rows[0].split(" | ")[2] == "1.000"
    assert not made[off].prepared.federation.settings.clips
    assert made[defaults].prepared.federation.settings.clips
    assert not made[defaults].prepared.federation.rules.validate
    assert made[validated].prepared.federation.rules.validate
    tensors = [one.progress.state.tensors for one in made.values()]
    assert all(one.clipped == one.lowered == 0 for one in made.values())  # so all trained the same
    assert all(torch.equal(value, other[name]) for other in tensors[1:] for name, value in tensors[0].items())
