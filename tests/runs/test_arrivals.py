"""Runs with asynchronous rounds: stopped and resumed, and repeated from their record, they end with the same bits."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedspan.config import RunConfig
from fedspan.errors import FedspanError
from fedspan.logs import read_lines
from fedspan.runs import session
from fedspan.runs.callbacks import Listener
from fedspan.runs.checkpoint import load_latest
from fedspan.runs.folder import RunFolder
from helpers import tiny
from helpers.watched_rounds import differences

METHOD = {"name": "fedsa-lora", "wrappers": ["fedavgm"]}
"""Clients store a factor and their moments, and the server a momentum."""


def make_config(folder: Path, *, simulation: dict[str, Any] | None = None, **buffered: Any) -> RunConfig:
    values = tiny.settings(
        folder,
        method=METHOD,
        federation={"rounds": 6, "clients_per_round": 2, "buffered": {"concurrency": 3, **buffered}},
        training={"optimizer_state": "keep"},
    )
    return tiny.parse_config(
        {**values, "simulation": simulation or {"speed": {"distribution": "uniform", "median": 10, "spread": 3}}}
    )


class Stopped(Exception):
    """The process is gone."""


class StopAfter(Listener):
    def __init__(self, round: int) -> None:
        self.round = round

    def on_round_finish(self, row: Mapping[str, Any]) -> None:
        if row["round"] == self.round:
            raise Stopped


@pytest.fixture(scope="module")
def recorded(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "run"
    session.run(make_config(tiny_folder), folder)
    return folder


def require_same_end(folder: Path, expected: Path) -> None:
    ours, theirs = (load_latest(RunFolder(path)) for path in (folder, expected))
    assert ours is not None
    assert theirs is not None
    for part in ("state", "memories", "optimizer_states", "last_rounds"):
        assert differences(dict(vars(ours))[part], dict(vars(theirs))[part]) == []
    adapter = Path("adapter", "adapter_model.safetensors")
    assert (folder / adapter).exists() == (expected / adapter).exists()


def get_arrivals(folder: Path) -> list[object]:
    return [row["arrivals"] for row in read_lines(RunFolder(folder).metrics)]


def test_a_stopped_run_ends_as_one_that_was_not(tiny_folder: Path, recorded: Path, tmp_path: Path) -> None:
    """Stopped twice, while orders are open whose states are older than the run's newest."""
    config, folder = make_config(tiny_folder), tmp_path / "run"
    with pytest.raises(Stopped):
        session.run(config, folder, listener=StopAfter(2))
    with pytest.raises(Stopped):
        session.run(None, folder, resume=True, listener=StopAfter(4))
    checkpoint = load_latest(RunFolder(folder))
    assert checkpoint is not None
    assert set(checkpoint.open.states) == {order.round for order in checkpoint.open.orders}
    assert min(checkpoint.open.states) < 3
    session.run(None, folder, resume=True)
    require_same_end(folder, recorded)
    assert get_arrivals(folder) == get_arrivals(recorded)
    ours, theirs = (load_latest(RunFolder(path)) for path in (folder, recorded))
    assert ours is not None
    assert theirs is not None
    assert differences(ours.open, theirs.open) == []


def test_a_record_of_arrivals_repeats_a_run(tiny_folder: Path, recorded: Path, tmp_path: Path) -> None:
    """With clients of other speeds, and stopped in between: the record alone decides."""
    speeds, folder = {"speed": {"distribution": "constant"}}, tmp_path / "run"
    config = make_config(tiny_folder, simulation=speeds, replay=str(recorded))
    with pytest.raises(Stopped):
        session.run(config, folder, listener=StopAfter(3))
    session.run(None, folder, resume=True)
    require_same_end(folder, recorded)
    assert get_arrivals(folder) == get_arrivals(recorded)
    assert all("simulated_seconds" not in row for row in read_lines(RunFolder(folder).metrics))


def test_a_record_that_does_not_fit_is_refused(tiny_folder: Path, recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(FedspanError, match="folder of a run with federation"):
        session.run(make_config(tiny_folder, replay=str(tmp_path / "none")), tmp_path / "first")
    config = make_config(tiny_folder, replay=str(recorded))
    longer = config.model_copy(update={"federation": config.federation.model_copy(update={"rounds": 7})})
    with pytest.raises(FedspanError, match="the record has the arrivals of 6 rounds, and this is round 7"):
        session.run(longer, tmp_path / "second")
    changed = tmp_path / "changed"
    changed.mkdir()
    text = RunFolder(recorded).metrics.read_text()
    (changed / "metrics.jsonl").write_text(text.replace('"arrivals": [["', '"arrivals": [["x', 1))
    with pytest.raises(FedspanError, match="does not match"):
        session.run(make_config(tiny_folder, replay=str(changed)), tmp_path / "third")


def test_a_stopped_replay_goes_on_with_its_record_alone(tiny_folder: Path, recorded: Path, tmp_path: Path) -> None:
    place, other, folder = tmp_path / "record", tmp_path / "other", tmp_path / "run"
    shutil.copytree(recorded, place)
    with pytest.raises(Stopped):
        session.run(make_config(tiny_folder, replay=str(place)), folder, listener=StopAfter(2))
    session.run(make_config(tiny_folder, simulation={"speed": {"distribution": "constant"}}), other)
    assert get_arrivals(other) != get_arrivals(recorded)
    place.rename(tmp_path / "moved")
    shutil.copytree(other, place)
    with pytest.raises(FedspanError, match=r"`federation\.buffered\.replay`: its arrivals are not those with which"):
        session.run(None, folder, resume=True)
    shutil.rmtree(place)
    (tmp_path / "moved").rename(place)
    session.run(None, folder, resume=True)
    require_same_end(folder, recorded)
