"""The start of a run: what is refused before anything is written, and the partition of an earlier start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedspan.config import parse_config
from fedspan.data.partition import ClientPart, Partition
from fedspan.errors import FedspanError
from fedspan.runs import start
from fedspan.runs.folder import RunFolder
from fedspan.runs.start import load_partition, run

CONFIG = parse_config({"data": {"train": "train.csv"}})


def fail(*_: Any) -> Any:
    raise AssertionError("nothing may be built")


def test_a_new_run_needs_a_config(tmp_path: Path) -> None:
    with pytest.raises(FedspanError, match="a config for a new run") as caught:
        run(None, tmp_path / "run", build=fail)
    assert caught.value.field == "config"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(FedspanError, match=r"notes\.txt"):
        run(CONFIG, tmp_path, build=fail)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_diagnoses_need_clients_in_this_process(tmp_path: Path) -> None:
    config = parse_config({"data": {"train": "train.csv"}, "evaluation": {"diagnostics": 2}})
    with pytest.raises(FedspanError, match="diagnostics need engine.name batched or loop".replace(".", r"\.")):
        run(config, tmp_path / "run", build=fail, host=fail)
    assert list(tmp_path.iterdir()) == []


def test_an_invalid_config_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "resolve_pooling", lambda config: (config, None))  # which loads the model's config

    def refuse(*_: Any) -> Any:
        raise FedspanError("data.train", "train.csv", "a file")

    with pytest.raises(FedspanError, match=r"data\.train"):
        run(CONFIG, tmp_path / "run", build=refuse)
    assert not (tmp_path / "run").exists()


def test_the_partition_of_an_earlier_start_is_loaded(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert load_partition(folder) is None
    rows = [np.array(values, dtype=np.int64) for values in ([0, 2], [1], [])]
    stored = Partition((ClientPart("east", *rows),), 3)
    folder.partition.write_text(stored.to_json())
    found = load_partition(folder)
    assert found is not None
    assert found.fingerprint == stored.fingerprint
    folder.partition.write_text(stored.to_json()[:-5])
    with pytest.raises(FedspanError, match=r"partition\.json"):
        load_partition(folder)
