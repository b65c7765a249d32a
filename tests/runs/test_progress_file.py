"""The file that tells other processes what a run does within a round."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import fedspan
from fedspan.errors import FedspanError
from fedspan.runs.progress_file import INTERVAL, ProgressFile
from fedspan.runs.setup import Prepared
from fedspan.training.stages import Stage
from helpers import tiny
from helpers.clock import Clock


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_clients_and_stages_of_a_round(prepared: Prepared, tmp_path: Path) -> None:
    path, clock = tmp_path / "progress.json", Clock()
    file = ProgressFile(path, clock)
    file.on_stage_change(Stage("model"))
    assert not path.exists()  # there is no folder yet
    with file:
        assert read(path)["stage"]["text"] == "loading the model"
        file.on_start(prepared, 0, False)
        begun = read(path)
        cohort = begun["cohort"]
        assert cohort == list(prepared.federation.draw_cohort(0))
        assert (begun["round"], begun["rounds"], begun["clients"], begun["replied"]) == (1, 3, 4, [])
        assert (begun["metric"], begun["is_percentage"]) == ("accuracy", True)
        clock.now += INTERVAL
        file.on_client_finish(1, cohort[0], 0.5)
        assert read(path)["losses"] == {cohort[0]: 0.5}
        clock.now += INTERVAL
        file.on_client_finish(1, cohort[1], float("nan"))
        assert read(path)["replied"] == cohort[:2]
        assert read(path)["losses"] == {cohort[0]: 0.5}
        file.on_round_finish({"round": 1})
        assert (read(path)["round"], read(path)["replied"]) == (2, [])
        file.on_round_finish({"round": 3})
        assert (read(path)["round"], read(path)["cohort"]) == (3, [])
        clock.now += INTERVAL
        file.on_baseline_start("local", 5)
        clock.now += INTERVAL
        file.on_baseline_round("local", 2, 0.5)
        assert read(path)["baseline"] == {"name": "local only", "round": 2, "rounds": 5}
    assert not path.exists()


def test_a_change_soon_after_a_write_is_written_a_little_later(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    with ProgressFile(path) as file:
        file.on_note("one")
        file.on_note("two")
        for _ in range(1000):
            if read(path)["notes"] == ["one", "two"]:
                break
            time.sleep(0.01)
        assert read(path)["notes"] == ["one", "two"]


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (FedspanError("nodes", 1, problem="1 of 3 nodes participate"), "failed", "`nodes`: 1 of 3 nodes participate."),
        (ZeroDivisionError("by zero"), "failed", "ZeroDivisionError: by zero"),
        (KeyboardInterrupt(), "interrupted", "interrupted (Ctrl-C)"),
    ],
)
def test_the_reason_of_a_failure_stays(error: BaseException, state: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    with pytest.raises(type(error)), ProgressFile(path):
        raise error
    assert (read(path)["state"], read(path)["reason"]) == (state, reason)


def test_a_folder_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path) -> None:
    with ProgressFile(tmp_path / "gone" / "progress.json") as file:
        file.on_note("one")
    assert list(tmp_path.iterdir()) == []


def test_a_run_writes_it_and_removes_it_at_the_end(tiny_folder: Path, tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    class Watcher(fedspan.Listener):
        def on_client_finish(self, round: int, client: str, loss: float) -> None:
            seen.append(read(tmp_path / "run" / "progress.json"))

    fedspan.run(tiny.settings(tiny_folder, federation={"rounds": 1}), tmp_path / "run", listener=Watcher())
    assert {len(entry["cohort"]) for entry in seen} == {3}
    assert not (tmp_path / "run" / "progress.json").exists()
