"""The processes of a deployment are started as the benchmarks start them; Flower's messages can be made."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))


@pytest.fixture
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower makes messages only where it knows of which task they are."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
