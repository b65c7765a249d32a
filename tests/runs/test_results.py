"""Results read from a run's folder: its report, partition and clients, or what is wrong with the folder."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedspan.data.partition import ClientPart, Partition
from fedspan.errors import FedspanError
from fedspan.runs.folder import RunFolder
from fedspan.runs.model_card import RunReport
from fedspan.runs.results import is_run, read_partition, read_report, require_client

REPORT = RunReport(
    method="fedit",
    task="sequence-classification",
    metric="accuracy",
    rounds=3,
    best_round=2,
    scores={"test": {"accuracy": 0.5}},
    by_client={},
    bytes={"down": 4, "up": 3},
    seconds=1.5,
    examples=({"text": "a", "prediction": "b"},),
    warnings=("diverged",),
)
RECORDED: dict[str, Any] = {"config": "digest", "files": {}, "logs": {}}


def run(folder: Path, **changes: Any) -> Path:
    """A run's folder with its report and the partition of two clients."""
    folder.mkdir()
    files = RunFolder(folder)
    files.config.write_text("seed: 0")
    files.write_sealed(files.report, {**asdict(REPORT), **RECORDED, **changes})
    parts = [
        ClientPart(id, *(np.array(rows, dtype=np.int64) for rows in split))
        for id, split in {"east": ([0, 2], [1], []), "west": ([3], [], [4])}.items()
    ]
    files.partition.write_text(Partition(tuple(parts), 5).to_json() + "\n")
    return folder


def test_a_report_comes_back_as_it_was_written(tmp_path: Path) -> None:
    folder = run(tmp_path / "run")
    assert is_run(folder)
    assert is_run(str(folder))
    assert read_report(folder) == REPORT


def test_folders_without_a_finished_run_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "missing", tmp_path / ("x" * 5000)):
        assert not is_run(folder)
    with pytest.raises(FedspanError, match="holds no run"):
        read_report(tmp_path / "empty")
    with pytest.raises(FedspanError, match="there is no folder"):
        read_report(tmp_path / "missing")
    folder = run(tmp_path / "run")
    RunFolder(folder).report.unlink()
    with pytest.raises(FedspanError, match=rf"this run is not finished\. Continue it with --resume {folder}"):
        read_report(folder)


def test_a_report_with_other_fields_or_of_other_content_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FedspanError, match=r"a report with .*best_round"):
        read_report(run(tmp_path / "more", accuracy=1.0))
    folder = run(tmp_path / "changed")
    path = RunFolder(folder).report
    path.write_text(path.read_text().replace('"rounds": 3', '"rounds": 4'))
    with pytest.raises(FedspanError, match="the file was changed after the run wrote it"):
        read_report(folder)


def test_the_partition_has_the_examples_of_each_client(tmp_path: Path) -> None:
    folder = run(tmp_path / "run")
    found = read_partition(folder)
    assert found.examples == 5
    assert {part.id: part.train.tolist() for part in found.clients} == {"east": [0, 2], "west": [3]}
    RunFolder(folder).partition.write_bytes(b"{\xff")
    with pytest.raises(FedspanError, match="partition"):
        read_partition(folder)


def test_an_unknown_client_is_told_the_nearest(tmp_path: Path) -> None:
    folder = run(tmp_path / "run")
    require_client(folder, "west")
    with pytest.raises(FedspanError, match=r"has no client 'wets'\. Did you mean 'west'"):
        require_client(folder, "wets")
