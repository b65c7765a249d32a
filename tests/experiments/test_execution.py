"""The execution of a series: settings, folders, command lines, and finished runs that are reused."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import fedspan
from fedspan.config import parse_config
from fedspan.errors import FedspanError
from fedspan.experiments.execution import (
    FinishedRuns,
    format_command_line,
    get_reusable_runs,
    open_series,
    read_settings,
    reuse_finished_runs,
)
from fedspan.experiments.series import Step
from fedspan.runs.folder import RunFolder
from fedspan.runs.integrity import format_config


def test_labels_beside_images_are_part_of_what_was_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, kind, values in (
        ("train-images-idx3-ubyte", 3, rng.integers(0, 256, (12, 8, 8), np.uint8)),
        ("train-labels-idx1-ubyte", 1, np.arange(12, dtype=np.uint8) % 2),
    ):
        header = struct.pack(f">BBBB{kind}I", 0, 0, 8, kind, *values.shape)
        (tmp_path / name).write_bytes(header + values.tobytes())
    images = str(tmp_path / "train-images-idx3-ubyte")
    config = parse_config(
        {
            "task": "image-classification",
            "data": {"train": images, "label": "label", "image": "image"},
            "model": {"name": "builtin:resnet-8", "image_size": 8, "target_modules": r"layer1\.0\.conv1"},
            "partition": {"clients": 2},
            "method": {"name": "fedit", "r": 2},
            "federation": {"rounds": 1},
        }
    )
    fedspan.run(config, tmp_path / "runs" / "run")
    known = FinishedRuns([tmp_path / "runs"])
    assert known.copy(config, tmp_path / "copy")
    later = (tmp_path / "runs" / "run" / "config.yaml").stat().st_mtime + 1
    os.utime(tmp_path / "train-labels-idx1-ubyte", (later, later))
    assert not known.copy(config, tmp_path / "other")


def step(name: str, **changes: Any) -> Step:
    config = parse_config({"data": {"train": "train.csv"}, **changes})
    return Step(name, name, "fedit", 0, config)


KINDS: dict[str, Any] = {"config": dict, "seeds": list, "rounds": (int, type(None))}


def test_the_settings_of_a_series_come_back_or_what_is_wrong_is_named(tmp_path: Path) -> None:
    path = tmp_path / "compare.yaml"
    with pytest.raises(FedspanError, match=r"holds no compare\.yaml\. Give a config to start a new series"):
        read_settings(tmp_path, "compare.yaml", KINDS)
    settings = {"config": {"seed": 1}, "seeds": [0, 1]}
    open_series(tmp_path, "compare.yaml", {**settings, "rounds": None}, [])
    assert read_settings(tmp_path, "compare.yaml", KINDS) == {**settings, "rounds": None}
    open_series(tmp_path, "compare.yaml", settings, [])  # of an earlier version
    assert read_settings(tmp_path, "compare.yaml", KINDS, {"rounds": 7}) == {**settings, "rounds": 7}
    for text in ("{config: {}, seeds: 1, rounds: 1}", "{config: {}, seeds: []}", "- 1", ""):
        path.write_text(text)
        with pytest.raises(FedspanError, match="the settings config, seeds, rounds, as they were written"):
            read_settings(tmp_path, "compare.yaml", KINDS)
    path.write_text("{")
    with pytest.raises(FedspanError, match="the file is not valid YAML"):
        read_settings(tmp_path, "compare.yaml", KINDS)


def test_a_folder_holds_the_runs_of_one_series_and_nothing_else(tmp_path: Path) -> None:
    steps = [step("a"), step("b", seed=1)]
    (tmp_path / "file").touch()
    with pytest.raises(FedspanError, match=r"is a file\. Choose another name"):
        open_series(tmp_path / "file", "compare.yaml", {}, steps)
    with pytest.raises(FedspanError, match=r"holds other files \(file\)\. Choose another folder"):
        open_series(tmp_path, "compare.yaml", {}, steps)
    folder = tmp_path / "series"
    open_series(folder, "compare.yaml", {"seeds": [0]}, steps)
    (folder / "compare.yaml.tmp-1").touch()
    (folder / "a").mkdir()
    RunFolder(folder / "a").config.write_text(format_config(steps[0].config))
    open_series(folder, "compare.yaml", {"seeds": [0, 1]}, steps)
    assert yaml.safe_load((folder / "compare.yaml").read_text()) == {"seeds": [0, 1]}
    with pytest.raises(FedspanError, match=r"the run a in .* began with another config"):
        open_series(folder, "compare.yaml", {}, [step("a", seed=5)])
    with pytest.raises(FedspanError, match="holds the run a, which does not belong to this series"):
        open_series(folder, "compare.yaml", {}, steps[1:])


def test_a_command_line_is_shown_as_it_was_typed() -> None:
    for program in ("fedspan", "/usr/bin/fedspan", "/lib/fedspan/__main__.py"):
        assert format_command_line([program, "compare", "a.yaml"]) == ["fedspan", "compare", "a.yaml"]
    assert format_command_line(["/home/me/script.py", "x"]) == ["script.py", "x"]
    assert format_command_line([]) == ["fedspan"]


def test_finished_runs_are_reused_within_a_context_alone() -> None:
    assert get_reusable_runs() is None
    with reuse_finished_runs([]):
        assert get_reusable_runs() is not None
        assert not get_reusable_runs().copy(step("a").config, Path("nowhere"))  # type: ignore[union-attr]
    assert get_reusable_runs() is None
