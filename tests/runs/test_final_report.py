"""The end of a run: what its report says of scores, messages and files, and that it is written last."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import fedspan
from fedspan.logs import read_lines
from fedspan.runs.folder import RunFolder
from fedspan.runs.records import compute_result_digests, read_records
from fedspan.runs.results import read_report
from helpers import tiny


@pytest.fixture(scope="module")
def finished(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds, of which the better one by loss is reported."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    fedspan.run(tiny.settings(tiny_folder, evaluation={"best_by": "loss"}), folder)
    return folder


def test_the_report_is_of_the_best_round_and_counts_all_messages(finished: Path) -> None:
    report, run = read_report(finished), RunFolder(finished)
    rows = {row["round"]: row for row in read_lines(run.metrics)}
    losses = {round: row["validation"]["loss"] for round, row in rows.items() if round}  # type: ignore[index]
    assert report.rounds == max(losses) == 2
    assert report.best_round == min(losses, key=losses.__getitem__)
    assert report.scores["test"]["loss"] == pytest.approx(rows[report.best_round]["test"]["loss"])  # type: ignore[index]
    for direction in ("down", "up"):
        sent = [row["bytes"] for row in read_lines(run.ledger) if row["direction"] == direction]
        assert report.bytes[direction] == sum(sent)  # type: ignore[arg-type]
    assert set(report.by_client) == set(tiny.SITES)
    assert report.adapters == {"global": "adapter"}


def test_the_report_names_every_result_and_the_ends_of_the_logs(finished: Path) -> None:
    run = RunFolder(finished)
    records = read_records(run)
    digests = compute_result_digests(run)
    assert len(digests) > 2
    assert {name: records.files.get(name) for name in digests} == digests
    ends = {name: position.length for name, position in records.positions.items()}
    assert ends == {path.name: path.stat().st_size for path in (run.metrics, run.ledger)}


def test_the_exported_files_are_on_the_disk_before_the_report_that_names_them(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    RunFolder(folder).report.unlink()
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.fstat(descriptor).st_ino))
    fedspan.resume(folder)
    before = flushed[: flushed.index((folder / "report.json").stat().st_ino)]
    adapter = folder / "adapter"
    assert {path.stat().st_ino for path in (adapter, *adapter.rglob("*"))} <= set(before)
    assert read_report(folder).scores == read_report(finished).scores
