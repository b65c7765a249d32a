"""Dry runs of presets."""

from typing import Any

import pytest

from fedspan.planning import plan
from fedspan.planning.compute import Compute, LocalTraining
from fedspan.reproduction.presets import SCALES, list_presets, load_preset
from fedspan.reproduction.rehearsal import dry_run

IDS = [preset.id for preset in list_presets()]
SHORT = {"fedgalore-figure4", "fedloru-figure3", "florg-bytes", "rolora-table6"}
"""One of each paper whose dry run takes less than a second when small."""
SIZES = [
    pytest.param(id, scale, marks=() if scale == "small" and id in SHORT else pytest.mark.slow)
    for id in IDS
    for scale in SCALES
]
"""At full size some take half a minute."""


@pytest.fixture
def without_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans without the FLOPs and memory of passes, which take seconds a model and are tested in tests/planning."""
    nothing = LocalTraining(Compute(None, 0, 0, 0, None, None, None, None), 0, 0)
    monkeypatch.setattr(plan, "compute_training_cost", lambda *_: nothing)


@pytest.mark.usefixtures("without_passes")
@pytest.mark.parametrize(("id", "scale"), SIZES)
def test_a_dry_run_needs_neither_weights_nor_data(id: str, scale: Any) -> None:
    found = dry_run(id, scale=scale)
    preset = load_preset(id)
    assert {each.method for each in found} == set(preset.get_labels(scale))
    for each in found:
        assert each.plan.trainable > 0
        assert each.plan.client.total > 0
        assert each.plan.all_steps is None or each.plan.all_steps > 0


@pytest.mark.usefixtures("without_passes")
def test_the_papers_own_numbers_come_out() -> None:
    """RoLoRA's figure 5: budgets of 187.5 and 250 KB a round (of LoRA, in bytes of 2^10 and its both ways)."""
    rows = dry_run("rolora-figure5", scale="full")
    sent = {(each.cell.partition("-")[2], each.method): each.plan.later_up for each in rows}
    for budget, kilobytes in (("187.5-kb", 187.5), ("250-kb", 250)):
        each = {method: count for (cell, method), count in sent.items() if cell.endswith(budget)}
        assert len(set(each.values())) == 1, "all methods send the same"
        assert each["LoRA"] == pytest.approx(1024 * kilobytes, rel=0.05)
