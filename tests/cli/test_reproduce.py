"""``fedspan reproduce``: listed, planned, run to its end, stopped and resumed, and its mistakes."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import fedspan
from fedspan import FedspanError, Watcher
from fedspan.config import parse_config
from fedspan.experiments.execution import FinishedRuns
from fedspan.experiments.series import Step
from fedspan.reproduction import reproduce
from fedspan.reproduction.presets import Preset, list_presets, read_preset
from fedspan.training.config import PrivacyConfig
from helpers import refusals, tiny
from helpers.command_line import Call


class Stop(BaseException):
    """Stands for Ctrl-C."""


class StopAfter(Watcher):
    def __init__(self, runs: int) -> None:
        self.left = runs

    def on_run_finish(self, *_: Any) -> None:
        self.left -= 1
        if not self.left:
            raise Stop


@pytest.fixture(scope="module")
def tiny_preset(tiny_folder: Path) -> Preset:
    """``tiny-table1``: two methods on the tiny model."""
    config = tiny.settings(tiny_folder, data={"train": "{data}/corpus.csv"}, federation={"clients_per_round": None})
    del config["method"]
    values = {
        "id": "tiny-table1",
        "paper": "Nobody's",
        "item": "Table 1",
        "title": "Two methods",
        "config": {**config, "method": {"r": 2, "lora_alpha": 4}},
        "axes": {"rounds": {"one": {"federation": {"rounds": 1}}, "two": {"federation": {"rounds": 2}}}},
        "methods": {"LoRA": {"key": "fedit"}, "FFA-LoRA": {"key": "ffa-lora"}},
        "sweep": {"training.lr": [0.02, 0.001]},
        "seeds": [0, 1],
        "claims": [
            {"statement": "FFA-LoRA sends less", "better": "FFA-LoRA", "worse": ["LoRA"], "measure": "bytes_up"},
            {"statement": "LoRA is better", "better": "LoRA", "worse": ["FFA-LoRA"], "cells": {"rounds": ["two"]}},
            *(
                {"statement": measure, "better": "FFA-LoRA", "worse": ["LoRA"], "measure": measure}
                for measure in ("bytes_to", "rounds_to", "alignment", "barrier", "state_step")
            ),
        ],
        "small": {"axes": {"rounds": {"two": {"federation": {"rounds": 2}}}}},
        "notes": ["It is tiny."],
    }
    return read_preset(values, "tiny-table1")


@pytest.fixture
def preset(tiny_preset: Preset, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes ``tiny-table1`` known; its data are in the folder that is given back."""
    monkeypatch.setattr(reproduce, "load_preset", lambda id: tiny_preset)
    return tiny_folder


class FinishedNames(Watcher):
    def __init__(self) -> None:
        self.names: dict[bool, list[str]] = {True: [], False: []}

    def on_run_finish(self, step: Step, metric: str, value: float | None, seconds: float, is_new: bool) -> None:
        self.names[is_new].append(step.name)


@dataclass(frozen=True)
class Finished:
    """A table that was reproduced once; ``folder`` is not to be changed."""

    folder: Path
    report: reproduce.Reproduction
    watcher: FinishedNames

    def copy(self, to: Path) -> Path:
        """Its folder once more, with the times of its files."""
        return shutil.copytree(self.folder, to)

    def is_reused(self, runs: Path, to: Path) -> bool:
        """Whether a copy of a run is made for a config of this table, from what is found in a folder."""
        config = parse_config(yaml.safe_load((self.folder / RUN / "config.yaml").read_text()))
        return FinishedRuns([runs]).copy(config, to)


RUN = Path("two") / "lora" / "seeds" / "fedit-seed1"
"""One of the runs of the table."""


@pytest.fixture(scope="module")
def finished_table(tiny_preset: Preset, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder, watcher = tmp_path_factory.mktemp("tables") / "one", FinishedNames()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reproduce, "load_preset", lambda id: tiny_preset)
        return Finished(folder, reproduce.reproduce("tiny-table1", folder, data=tiny_folder, listener=watcher), watcher)


@pytest.mark.slow
def test_all_rows_share_a_rate_under_the_matched_protocol(
    tiny_preset: Preset, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tiny_preset.small.model_copy(update={"matched": {"training.lr": 0.005}})
    monkeypatch.setattr(reproduce, "load_preset", lambda id: tiny_preset.model_copy(update={"small": small}))
    folder = tmp_path / "matched"
    report = reproduce.reproduce("tiny-table1", folder, data=tiny_folder, seeds=[1], protocol="matched")
    assert report.seeds == (1,)
    assert [(score.method, score.selected, len(score.scores)) for score in report.scores] == [
        (label, {"training.lr": 0.005}, 1) for label in ("LoRA", "FFA-LoRA")
    ]
    for path in folder.rglob("config.yaml"):
        assert parse_config(yaml.safe_load(path.read_text())).training.lr == 0.005
    assert {judged.verdict for judged in report.verdicts} <= {"inconclusive", "not runnable here"}  # of one seed
    assert reproduce.resume_reproduction(folder).scores == report.scores
    with pytest.raises(FedspanError, match="was started with protocol 'matched'"):
        reproduce.reproduce("tiny-table1", folder, data=tiny_folder, seeds=[1])


def test_a_protocol_that_a_preset_lacks_is_named(preset: Path, tmp_path: Path) -> None:
    with refusals.refused("protocol", r"`protocol`"):
        reproduce.reproduce("tiny-table1", tmp_path / "none", data=preset, protocol="matched")
    assert not (tmp_path / "none").exists()


def test_a_swept_field_that_is_set_is_not_swept(preset: Path, tmp_path: Path) -> None:
    overrides = ["training.lr=0.003", "federation.rounds=1"]
    report = reproduce.reproduce("tiny-table1", tmp_path / "set", data=preset, seeds=[0], overrides=overrides)
    assert [score.selected for score in report.scores] == [{}, {}]
    configs = [parse_config(yaml.safe_load(path.read_text())) for path in (tmp_path / "set").rglob("config.yaml")]
    assert [config.training.lr for config in configs] == [0.003, 0.003]


@pytest.mark.slow
def test_a_table_is_stopped_resumed_and_judged(preset: Path, tmp_path: Path, call: Call) -> None:
    folder = tmp_path / "table"
    with pytest.raises(Stop):
        reproduce.reproduce("tiny-table1", folder, data=preset, listener=StopAfter(4))
    assert not (folder / "table.json").exists()
    begun = (folder / "two" / "lora" / "sweep" / "trial-001-seed0" / "report.json").stat().st_mtime_ns
    found = call("reproduce", "--resume", folder)
    assert found.exit_code == 0, found.output
    assert "FFA-LoRA sends less (FFA-LoRA over LoRA, by +0.0" in " ".join(found.output.split())
    assert (folder / "two" / "lora" / "sweep" / "trial-001-seed0" / "report.json").stat().st_mtime_ns == begun
    report = json.loads((folder / "table.json").read_text())
    assert [(each["cell"], each["method"], len(each["scores"])) for each in report["scores"]] == [
        ("two", "LoRA", 2),
        ("two", "FFA-LoRA", 2),
    ]
    assert all(each["selected"]["training.lr"] in (0.02, 0.001) for each in report["scores"])
    assert report["scores"][1]["bytes_up"] < report["scores"][0]["bytes_up"]
    assert {one["verdict"] for one in report["verdicts"]} <= {"holds", "contradicted", "inconclusive"}
    for one in report["scores"]:
        assert set(one["measured"]) == {"alignment", "barrier", "state_step"}
        assert all(0 < value <= 1 for value in one["measured"]["alignment"])
        assert [[point["round"] for point in curve] for curve in one["curves"]] == [[1, 2]] * 2
    assert report["verdicts"][0]["verdict"] == "holds"
    page = (folder / "table.md").read_text()
    assert "# Nobody's: Table 1" in page
    assert "It is tiny." in page
    again = reproduce.reproduce("tiny-table1", folder, data=preset)
    assert [each.mean for each in again.scores] == [each["mean"] for each in report["scores"]]
    with pytest.raises(FedspanError, match=r"was started with scale 'small'\. Choose another folder\."):
        reproduce.reproduce("tiny-table1", folder, data=preset, scale="full")


def test_no_run_is_run_twice(preset: Path, finished_table: Finished, tmp_path: Path, call: Call) -> None:
    first, second = finished_table.watcher, FinishedNames()
    # two trials and two seeds for each of two rows; the first seed of what was chosen is a trial
    assert len(first.names[True]) == 6
    assert [name for name in first.names[False] if not name.endswith("-seed0")] == []
    assert len(first.names[False]) == 2

    one = finished_table.copy(tmp_path / "one")
    for path in one.rglob("config.yaml"):  # as if of before an option was added, or damaged
        values = yaml.safe_load(path.read_text())
        del values["training"]["min_lr"]
        path.write_text(yaml.safe_dump(values, explicit_end=True))
    for damaged, file in (("damaged", "config.yaml"), ("a-damaged", "environment.json")):
        shutil.copytree(one / RUN, one / damaged)
        (one / damaged / file).write_text("{")
    reproduce.reproduce("tiny-table1", tmp_path / "two", data=preset, reuse=[one], listener=second)
    assert second.names[True] == []
    before, after = (json.loads((tmp_path / name / "table.json").read_text()) for name in ("one", "two"))
    assert before["scores"] == after["scores"]
    assert [judged.verdict for judged in finished_table.report.verdicts] == [
        each["verdict"] for each in after["verdicts"]
    ]
    assert call("predict", tmp_path / "two" / RUN, "a tree").exit_code == 0, "a copy is a run like any other"


def test_runs_of_other_versions_are_rerun(finished_table: Finished, tmp_path: Path) -> None:
    one = finished_table.copy(tmp_path / "one")
    assert finished_table.is_reused(one, tmp_path / "copy")
    for path in one.rglob("environment.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "torch": "1.0"}))
    assert not finished_table.is_reused(one, tmp_path / "other")


@pytest.mark.slow
def test_timed_runs_are_rerun(
    tiny_preset: Preset, preset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = tiny_preset.model_copy(
        update={"claims": [tiny_preset.claims[1].model_copy(update={"measure": "seconds_to"})]}
    )
    monkeypatch.setattr(reproduce, "load_preset", lambda id: timed)
    seen = FinishedNames()
    reproduce.reproduce("tiny-table1", tmp_path / "one", data=preset, seeds=[0], listener=seen)
    assert len(seen.names[True]) == 6  # two trials of each of two rows, and what was chosen once more


def test_runs_that_read_changed_files_are_rerun(preset: Path, finished_table: Finished, tmp_path: Path) -> None:
    data = preset / "corpus.csv"
    before = data.stat()
    assert finished_table.is_reused(finished_table.folder, tmp_path / "copy")
    try:
        later = (finished_table.folder / "table.json").stat().st_mtime + 1
        os.utime(data, (later, later))
        assert not finished_table.is_reused(finished_table.folder, tmp_path / "other")
    finally:
        os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_runs_with_secret_noise_or_changed_files_are_not_reused(preset: Path, tmp_path: Path) -> None:
    run = tiny.config(preset, federation={"rounds": 1})
    fedspan.run(run, tmp_path / "one" / "run")
    known = FinishedRuns([tmp_path / "one"])
    privacy = {"mechanism": "central", "clip": 1.0, "noise": 1.0, "randomness": "secret"}
    assert known.copy(run, tmp_path / "copy")
    assert not known.copy(run.model_copy(update={"privacy": PrivacyConfig.model_validate(privacy)}), tmp_path / "other")
    other_threads = run.model_copy(update={"threads": (run.threads or torch.get_num_threads()) + 1})
    assert not known.copy(other_threads, tmp_path / "other")
    adapter = tmp_path / "one" / "run" / "adapter" / "adapter_model.safetensors"
    content = bytearray(adapter.read_bytes())
    content[-1] ^= 1
    adapter.write_bytes(content)
    assert not known.copy(run, tmp_path / "changed")


def test_presets_are_listed_and_planned(call: Call) -> None:
    shown = call("reproduce")
    assert shown.exit_code == 0, shown.output
    assert all(preset.id in shown.output for preset in list_presets())
    plain = json.loads(call("reproduce", "--json").output)
    assert {each["id"] for each in plain} == {preset.id for preset in list_presets()}
    planned = call("reproduce", "florg-bytes", "--dry-run")
    assert planned.exit_code == 0, planned.output
    assert "FedEx-LoRA" in planned.output
    rows = json.loads(call("reproduce", "florg-bytes", "--dry-run", "--json").output)
    assert {row["method"] for row in rows} == {"FLoRG", "FedIT", "FeDeRA", "FedEx-LoRA"}


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["rolora-tabel1", "--dry-run"], "ID"),
        (["rolora-table1", "--dry-run", "--scale", "tiny"], "--scale"),
        (["rolora-table1"], "--out"),
        (["rolora-table1", "--out", "x"], "--data"),
        (["rolora-table2", "--data", ".", "--out", "x"], "--model"),
        (["rolora-table1", "--resume", "x"], "ID"),
        (["florg-bytes", "--data", ".", "--out", "x", "--reuse", "none"], "--reuse"),
        (["--reuse", "x"], "ID"),
        (["--out", "x"], "ID"),
        (["--seeds", "0"], "ID"),
        (["florg-bytes", "--data", ".", "--out", "x", "--seeds", "0;1"], "--seeds"),
        (["--resume", "x"], "folder"),
    ],
)
def test_mistakes(arguments: list[str], field: str, refused: Callable[..., str]) -> None:
    assert refused("reproduce", *arguments).startswith(f"`{field}`: ")


def test_a_folder_with_other_things_is_refused(preset: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with refusals.refused("folder", r"holds other files"):
        reproduce.reproduce("tiny-table1", tmp_path, data=preset)
