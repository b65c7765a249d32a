"""A run's numbers in TensorBoard, once each, after a resume too; and what is said of trackers that are not there."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

import fedspan
from fedspan import FedspanError
from fedspan.progress.trackers import select_numbers
from helpers import tiny
from helpers.listeners import Notes

pytest.importorskip("tensorboard", reason="tensorboard is not installed")


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, list[tuple[int, float]]] = {}
    for place in sorted({path.parent for path in (folder / "tensorboard").rglob("*tfevents*")}):
        events = EventAccumulator(str(place))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            found.setdefault(tag, []).extend((event.step, event.value) for event in events.Scalars(tag))
    return {tag: sorted(values) for tag, values in found.items()}


def test_every_round_stands_there_once_after_a_resume_too(tiny_folder: Path, tmp_path: Path) -> None:
    config, run = tiny.config(tiny_folder, federation={"rounds": 3}), tmp_path / "run"
    listener = Notes(2)
    with pytest.raises(KeyboardInterrupt):
        fedspan.run(config, run, listener=listener, track=["tensorboard"])
    fedspan.resume(run, track=["tensorboard"])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = scalars(run)
    assert [step for step, _ in found["test/accuracy"]] == [1, 2, 3]
    for row, (_, value) in zip(rows, found["loss"], strict=True):
        assert value == pytest.approx(row["loss"], rel=1e-6)
    assert {"validation/loss", "clients/worst/accuracy", "bytes/up", "lr"} <= set(found)
    alone = fedspan.run(config, tmp_path / "alone")
    adapters = [(place / "adapter" / "adapter_model.safetensors").read_bytes() for place in (run, tmp_path / "alone")]
    assert adapters[0] == adapters[1]
    assert alone.rounds == 3


@pytest.mark.parametrize(
    "call", [pytest.param("start", marks=pytest.mark.slow), "log", pytest.param("finish", marks=pytest.mark.slow)]
)
def test_a_failing_tracker_is_noted(
    call: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Mock(side_effect=ConnectionError("no way there"))
    monkeypatch.setattr(f"accelerate.tracking.TensorBoardTracker.{call}", failing)
    listener = Notes()
    config = tiny.config(tiny_folder, federation={"rounds": 2})
    report = fedspan.run(config, tmp_path / "run", listener=listener, track=["tensorboard"])
    assert report.rounds == 2
    (said,) = [note for note in listener.notes if "tensorboard" in note]
    assert "ConnectionError: no way there" in said


def test_numbers_of_a_row() -> None:
    row = {"round": 3, "loss": 0.5, "cohort": ["a"], "test": {"accuracy": 1, "f1": float("nan")}, "failures": []}
    assert select_numbers(row) == {"loss": 0.5, "test/accuracy": 1.0}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tensorbord", "`track`: 'tensorbord' is not accepted. Expected one of tensorboard, wandb"),
        ("wandb", "pip install wandb"),
    ],
)
def test_mistakes(name: str, said: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FedspanError, match=re.escape(said)):
        fedspan.run(tiny.config(tiny_folder), tmp_path / "run", track=[name])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("track", "there"), [([], True), (["--track", "none"], False)])
def test_the_command_takes_what_is_installed(
    track: list[str], there: bool, tiny_folder: Path, tmp_path: Path, call: Callable[..., Any]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tiny.settings(tiny_folder, federation={"rounds": 1})))
    result = call("run", str(path), "--out", str(tmp_path / "run"), *track)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "run" / "tensorboard").is_dir() is there
