"""The file that tells other processes what a run does within a round."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import fedspan
from fedspan.errors import FedspanError
from fedspan.runs.callbacks import Listeners
from fedspan.runs.progress_file import INTERVAL, ProgressFile
from fedspan.runs.setup import Prepared, prepare
from fedspan.training.stages import Stage
from helpers import tiny


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def wait_for(path: Path, **expected: object) -> dict[str, Any]:
    """Return the file's content once it has these values; a thread writes it."""
    until = time.monotonic() + 30
    while True:
        content = read(path)
        if all(content.get(name) == value for name, value in expected.items()):
            return content
        assert time.monotonic() < until, (content, expected)
        time.sleep(0.005)


def test_clients_and_stages_of_a_round(prepared: Prepared, tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    file = ProgressFile(path)
    file.on_stage_change(Stage("model"))
    assert not path.exists()  # there is no folder yet
    with file:
        assert read(path)["stage"]["text"] == "loading the model"
        file.on_start(prepared, 0, False)
        started = wait_for(path, rounds=3, clients=4)
        assert "round" not in started
        assert (started["metric"], started["is_percentage"]) == ("accuracy", True)
        file.on_round_start(1)
        cohort = list(prepared.federation.draw_cohort(0))
        wait_for(path, round=1, cohort=cohort, replied=[], failures={})
        file.on_client_finish(1, cohort[0], 0.5)
        file.on_client_failure(1, cohort[1], "x" * 5000)
        wait_for(path, losses={cohort[0]: 0.5}, failures={cohort[1]: "x" * 500})
        file.on_client_finish(1, cohort[1], float("nan"))  # in another attempt
        wait_for(path, replied=cohort[:2], losses={cohort[0]: 0.5}, failures={})
        file.on_round_finish({"round": 1})
        wait_for(path, round=None, round_started=None, cohort=[], replied=[])  # no round follows, as far as is known
        file.on_round_start(2)
        wait_for(path, round=2, cohort=list(prepared.federation.draw_cohort(1)), replied=[])
        file.on_baseline_start("local", 5)
        file.on_baseline_round("local", 2, 0.5)
        wait_for(path, baseline={"name": "local only", "round": 2, "rounds": 5})
    assert not path.exists()


def test_clients_with_an_order_are_those_of_an_asynchronous_round(tiny_folder: Path, tmp_path: Path) -> None:
    """None of them is drawn before; the live page shows who replied, and who failed, within the round."""
    federation = {"rounds": 2, "clients_per_round": 2, "buffered": {"concurrency": 2}}
    orders = list[tuple[int, list[str], list[str]]]()

    class Watcher(fedspan.Listener):
        def on_client_finish(self, round: int, client: str, loss: float) -> None:
            orders.append((round, [*file._state["cohort"]], [*file._losses]))

    simulation = {"speed": {"distribution": "uniform", "median": 10, "spread": 3}}
    settings = tiny.settings(tiny_folder, federation=federation, simulation=simulation)
    with ProgressFile(tmp_path / "progress.json") as file:
        fedspan.run(settings, tmp_path / "run", listener=Listeners(file, Watcher()))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    by_round = {row["round"]: [id for id, _ in row["arrivals"]] for row in rows if row["round"]}
    for round, arrived in by_round.items():
        seen = [entry for entry in orders if entry[0] == round]
        assert sorted(seen[-1][2]) == sorted(arrived)
        assert set(arrived) <= set(seen[-1][1])


def test_a_reply_to_an_order_of_an_earlier_asynchronous_round_adds_its_client_alone(
    tiny_folder: Path, tmp_path: Path
) -> None:
    federation = {"rounds": 2, "clients_per_round": 2, "buffered": {"concurrency": 2}}
    with ProgressFile(tmp_path / "progress.json") as file:
        file.on_start(prepare(tiny.config(tiny_folder, federation=federation)), 0, False)
        file.on_round_start(1)
        file.on_client_order(1, "west")
        file.on_client_finish(1, "west", 0.5)
        file.on_round_finish({"round": 1})
        file.on_round_start(2)
        file.on_client_order(2, "east")
        file.on_client_finish(2, "north", 0.25)
        wait_for(tmp_path / "progress.json", round=2, cohort=["east", "north"], losses={"north": 0.25})


def test_many_changes_are_few_writes(prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, written, began = tmp_path / "progress.json", list[Path](), time.monotonic()
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, target: written.append(self) or replace(self, target))
    with ProgressFile(path) as file:
        file.on_start(prepared, 0, False)
        for round in range(1, 500):
            file.on_round_start(round)
            file.on_round_finish({"round": round})
        file.on_note("last")
        wait_for(path, notes=["last"])
        assert 2 <= len(written) <= 2 + (time.monotonic() - began) / INTERVAL


def test_a_disk_that_hangs_does_not_hold_up_training(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, writing, may_write = tmp_path / "progress.json", threading.Event(), threading.Event()
    replace = Path.replace

    def replace_late(self: Path, target: Path) -> Path:
        writing.set()
        assert may_write.wait(30)
        return replace(self, target)

    with ProgressFile(path) as file:
        monkeypatch.setattr(Path, "replace", replace_late)
        file.on_note("one")
        assert writing.wait(30)
        file.on_start(prepared, 0, False)  # these return while the file is being written
        file.on_stage_change(Stage("training"))
        file.on_round_start(1)
        file.on_round_finish({"round": 1})
        assert "rounds" not in read(path)
        may_write.set()
        wait_for(path, notes=["one"], rounds=3)
    assert not path.exists()


def test_a_change_soon_after_a_write_is_written_a_little_later(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    with ProgressFile(path) as file:
        file.on_note("one")
        file.on_note("two")
        wait_for(path, notes=["one", "two"])


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
    path, seen = tmp_path / "run" / "progress.json", list[dict[str, Any]]()

    class Watcher(fedspan.Listener):
        def on_client_finish(self, round: int, client: str, loss: float) -> None:
            seen.append(wait_for(path, round=round))

    fedspan.run(tiny.settings(tiny_folder, federation={"rounds": 2}), tmp_path / "run", listener=Watcher())
    assert {len(entry["cohort"]) for entry in seen} == {3}
    assert {entry["round"] for entry in seen} == {1, 2}
    assert not path.exists()
