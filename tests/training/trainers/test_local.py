"""What a trainer trains in a round: the job's steps or epochs, or else the run's, and a seed of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedspan.core.values import Job, OptimizerSpec
from fedspan.training.jobs import Assignment, TrainingSettings
from fedspan.training.trainers.local import plan_round


def assignment(**changes: Any) -> Assignment:
    return Assignment("east", 4, Job({}, {}, (), **changes), np.arange(3), 0.25)


@pytest.mark.parametrize(
    ("settings", "job", "epochs", "steps"),
    [
        ({"epochs": 3}, {}, 3, None),
        ({"epochs": 3, "steps": 7}, {}, 3, 7),
        ({"epochs": 3, "steps": 7}, {"steps": 2}, 3, 2),
        ({"epochs": 3, "steps": 7}, {"epochs": 2}, 2, None),  # a job's epochs replace the run's steps
        ({"epochs": 3, "steps": 7}, {"steps": 0}, 1, None),  # a probe sees each example once
    ],
)
def test_a_job_s_own_steps_and_epochs_come_first(
    settings: dict[str, int], job: dict[str, int], epochs: int, steps: int | None
) -> None:
    plan = plan_round(TrainingSettings(OptimizerSpec(), **settings), 1, assignment(**job))  # type: ignore[arg-type]
    assert (plan.epochs, plan.steps) == (epochs, steps)
    assert (plan.client, plan.round, plan.phase, plan.lr) == ("east", 4, "train", 0.25)


def test_every_round_client_and_phase_has_a_seed_of_its_own() -> None:
    settings, first = TrainingSettings(OptimizerSpec()), assignment()
    others = [
        (1, replace(first, round=5)),
        (1, replace(first, client="west")),
        (1, assignment(phase="second")),
        (2, first),
    ]
    seeds = [plan_round(settings, seed, one).seed for seed, one in [(1, first), *others]]
    assert len(set(seeds)) == 5
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert plan_round(settings, 1, replace(first, lr=9.0)).seed == seeds[0]
