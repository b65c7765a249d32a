"""The learning rates of a job."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedspan.core.values import OptimizerSpec
from fedspan.training.jobs import TrainingSettings


def test_a_schedule_may_start_again_and_end_above_zero() -> None:
    settings = TrainingSettings(OptimizerSpec(lr=0.3), schedule="cosine", min_lr=0.1, cycle_rounds=2)
    assert [settings.compute_lr(round, 5) for round in range(5)] == pytest.approx([0.3, 0.2, 0.3, 0.2, 0.3])
    linear = replace(settings, schedule="linear", cycle_rounds=4, warmup_rounds=1)
    assert [linear.compute_lr(round, 6) for round in range(6)] == pytest.approx([0.15, 0.3, 0.25, 0.2, 0.15, 0.3])
    assert replace(linear, schedule="constant").compute_lr(3, 6) == 0.3
