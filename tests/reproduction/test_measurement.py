"""Measures of a finished run: from its metrics, its report, its checkpoints, or from one more round."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedspan.logs import JsonLines
from fedspan.reproduction import measurement
from fedspan.reproduction.measurement import MEASURED, measure
from fedspan.runs.folder import RunFolder


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of pairs of the rounds that were diagnosed."""
    pairs_asked: list[int] = []

    def diagnose(folder: Path, *, pairs: int) -> Any:
        pairs_asked.append(pairs)
        heights = [SimpleNamespace(height=value) for value in (1.0, 2.0, 6.0)[:pairs]]
        return SimpleNamespace(barriers=heights, alignment=math.nan if pairs else 0.5)

    monkeypatch.setattr(measurement, "diagnose", diagnose)
    return pairs_asked


def write_metrics(folder: Path, *alignments: Any) -> None:
    with JsonLines(RunFolder(folder).metrics) as lines:
        for round, value in enumerate(alignments, start=1):
            lines.append({"round": round, **({} if value == "" else {"diagnostics": {"alignment": value}})})
        lines.commit()


def test_recorded_alignments_of_the_second_half_are_averaged(tmp_path: Path, asked: list[int]) -> None:
    write_metrics(tmp_path, 0.9, "", 0.9, 0.9, 0.25, "", None, 0.75)
    assert measure(tmp_path, ["alignment"]) == {"alignment": 0.5}
    assert asked == []


def test_without_a_record_one_more_round_is_diagnosed(tmp_path: Path, asked: list[int]) -> None:
    write_metrics(tmp_path, 0.9, "", "")
    assert measure(tmp_path, ["alignment"]) == {"alignment": 0.5}
    assert measure(tmp_path, ["barrier"]) == {"barrier": 3.0}
    assert measure(tmp_path, ["barrier", "alignment"]) == {"barrier": 3.0, "alignment": None}
    assert asked == [0, 3, 3]


@pytest.mark.parametrize(
    ("scores", "expected"), [({"test": {"exact_match": 0.5}}, 0.5), ({"test": {}}, None), ({}, None)]
)
def test_exact_matches_are_the_report_s(
    scores: dict[str, Any], expected: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurement, "read_report", lambda folder: SimpleNamespace(scores=scores))
    assert measure(tmp_path, ["exact_match"]) == {"exact_match": expected}


def test_the_last_step_is_relative_and_of_the_target_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from fedspan.core.values import ServerState

    states: dict[str | int, ServerState] = {
        "last": ServerState(3, {"fc/A": torch.tensor([[3.0, 4.5]]), "extras/head": torch.ones(2)}),
        2: ServerState(2, {"fc/A": torch.tensor([[3.0, 4.0]]), "extras/head": torch.zeros(2)}),
    }
    monkeypatch.setattr(measurement.checkpoints, "select_checkpoint", lambda run, round: round)
    monkeypatch.setattr(measurement, "load_checkpoint", lambda place: SimpleNamespace(state=states[place]))
    assert measure(tmp_path, ["state_step"]) == {"state_step": pytest.approx(0.1)}
    states[2] = ServerState(2, {"fc/A": torch.zeros(1, 2)})
    assert measure(tmp_path, ["state_step"]) == {"state_step": None}  # from nothing
    states[2] = ServerState(2, {"fc/A": torch.zeros(2, 1)})
    assert measure(tmp_path, ["state_step"]) == {"state_step": None}  # of other coordinates
    states["last"] = ServerState(1)
    assert measure(tmp_path, ["state_step"]) == {"state_step": None}


def test_what_is_measured_is_listed() -> None:
    assert {"exact_match", "alignment", "barrier", "state_step"} == MEASURED
