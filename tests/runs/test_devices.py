"""Restriction of torch to deterministic algorithms."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedspan.config import parse_config
from fedspan.planning import calibration
from fedspan.runs import devices, remote, trainer_setup
from fedspan.runs.devices import set_algorithms
from fedspan.runs.setup import prepare
from helpers import tiny

GPU, CPU = torch.device("cuda:0"), torch.device("cpu")


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The values passed to ``torch.use_deterministic_algorithms``, in order."""
    found: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", found.append)
    monkeypatch.setattr(devices, "_restricts_torch", False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    return found


def test_torch_is_restricted_for_runs_that_ask_for_it_alone(modes: list[bool]) -> None:
    set_algorithms(True, CPU)
    set_algorithms(False, GPU)  # the user's own setting stays
    assert modes == []
    set_algorithms(True, GPU)
    set_algorithms(True, GPU)
    set_algorithms(False, GPU)
    set_algorithms(False, GPU)
    assert modes == [True, True, False]


def test_simulations_servers_and_calibrations_pass_it_on(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def stop(deterministic: bool, device: torch.device) -> None:
        asked.append(deterministic)
        raise InterruptedError

    for module in (trainer_setup, remote, calibration):
        monkeypatch.setattr(module, "set_algorithms", stop)
    values = {**tiny.settings(tiny_folder), "deterministic": True}
    with pytest.raises(InterruptedError):
        prepare(parse_config(values))
    with pytest.raises(InterruptedError):
        calibration.measure_speed(parse_config(values), ("a", "b"), None, base=1000, length=None, clients=2, steps=1)
    with pytest.raises(InterruptedError):
        remote.prepare_server(parse_config({**values, "data": {**values["data"], "labels": list(tiny.LABELS)}}))
    assert asked == [True] * 3
