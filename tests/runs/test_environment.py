"""The environment of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedspan
from fedspan.runs.environment import record_environment
from fedspan.runs.folder import RunFolder

CONFIG = "seed: 1  # ключ\n"


def test_the_environment_is_recorded_once_and_compared_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunFolder.create(tmp_path, CONFIG) as run:
        assert record_environment(run, 3, ["fedspan", "run"]) == {}
        first = run.environment.read_bytes()
        recorded = run.read_json(run.environment)
        assert isinstance(recorded, dict)
        assert recorded["fedspan"] == fedspan.__version__
        assert recorded["torch"] == torch.__version__
        assert recorded["command"] == ["fedspan", "run"]
        assert record_environment(run, 3, ["fedspan", "run", "--resume"]) == {}
        monkeypatch.setattr(fedspan, "__version__", "9")
        assert record_environment(run, 4, ["fedspan"]) == {"fedspan": (recorded["fedspan"], "9"), "seed": (3, 4)}
        assert run.environment.read_bytes() == first


def test_threads_are_those_that_the_config_asks_for(tmp_path: Path) -> None:
    """A resumed run is compared before its model is built, which sets them."""
    now = torch.get_num_threads()
    with RunFolder.create(tmp_path, CONFIG) as run:
        record_environment(run, 3, [])
        assert record_environment(run, 3, [], now + 1) == {"threads": (now, now + 1)}
        assert record_environment(run, 3, [], now) == {}
