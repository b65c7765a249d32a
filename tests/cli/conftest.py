"""A run that is finished, one that was stopped, and configs for the commands."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers import tiny
from helpers.command_line import Call, Write


@pytest.fixture(scope="session")
def write(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Write:
    """A config file for the tiny model and corpus, with changes in its sections."""

    def written(baselines: tuple[str, ...] = (), **changes: Any) -> Path:
        values = {**tiny.settings(tiny_folder, **changes), "baselines": list(baselines)}
        path = tmp_path_factory.mktemp("config") / "tiny.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return written


@pytest.fixture(scope="session")
def finished(call: Call, write: Write, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with both baselines; not to be changed."""
    config = write(("local-only", "centralized"), federation={"rounds": 2})
    return _run(call, config, tmp_path_factory.mktemp("runs") / "finished")


def _run(call: Call, config: Path, folder: Path) -> Path:
    result = call("run", config, "--out", folder)
    assert result.exit_code == 0, result.output
    (folder.parent / "screen.txt").write_text(result.stdout)
    return folder


@pytest.fixture(scope="session")
def personal(call: Call, write: Write, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run in which every client has its own model."""
    config = write(method={"name": "fedsa-lora"}, federation={"rounds": 1})
    return _run(call, config, tmp_path_factory.mktemp("runs") / "personal")


@pytest.fixture(scope="session")
def _stopped(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "stopped"
    shutil.copytree(finished, folder)
    (folder / "report.json").unlink()
    shutil.rmtree(folder / "adapter")
    shutil.rmtree(folder / "checkpoints" / "round-00002")
    return folder


@pytest.fixture
def stopped(_stopped: Path, tmp_path: Path) -> Path:
    """A run of two rounds that was stopped in the second; a copy to be changed."""
    return Path(shutil.copytree(_stopped, tmp_path / "stopped"))
