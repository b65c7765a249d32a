"""What a report names beside its results: files of the run that were changed, and the models that it exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedspan.errors import FedspanError
from fedspan.files import compute_sha256
from fedspan.logs import Position
from fedspan.runs.folder import RunFolder
from fedspan.runs.records import Records, compute_result_digests, read_records, require_intact_model, require_same_files


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A finished run with a global adapter, whose report names its files."""
    folder = RunFolder(tmp_path / "run")
    (folder.adapter / "east").mkdir(parents=True)
    for path in ("config.yaml", "environment.json", "adapter/weights", "adapter/README.md", "adapter/east/weights"):
        (folder.path / path).write_text(f"content of {path}")
    write_report(folder)
    return folder


def write_report(run: RunFolder, **changes: Any) -> None:
    logs = {"metrics.jsonl": [12, "ab"]}
    files = compute_result_digests(run)
    run.write_sealed(run.report, {"config": "digest", "files": files, "logs": logs, **changes})


def test_exported_files_have_digests_except_for_cards(run: RunFolder) -> None:
    assert compute_result_digests(run) == {
        name: compute_sha256(run.path / name)
        for name in ("environment.json", "adapter/east/weights", "adapter/weights")
    }


def test_records_come_back_as_they_were_written(run: RunFolder) -> None:
    assert read_records(run) == Records("digest", compute_result_digests(run), {"metrics.jsonl": Position(12, "ab")})


@pytest.mark.parametrize("changes", [{"files": None}, {"logs": {"metrics.jsonl": [12]}}, {"logs": [1]}])
def test_a_report_without_them_is_refused(run: RunFolder, changes: dict[str, Any]) -> None:
    write_report(run, **changes)
    with pytest.raises(FedspanError, match="a report with config, files, logs"):
        read_records(run)


def test_files_that_are_missing_or_changed_are_named_with_their_source(run: RunFolder) -> None:
    digests = compute_result_digests(run)
    require_same_files(run, digests)
    (run.path / "another").write_text("is not checked")
    require_same_files(run, digests)
    (run.adapter / "weights").write_text("other weights")
    with pytest.raises(FedspanError, match=r"was changed after the run wrote it.*that the checkpoint names") as caught:
        require_same_files(run, digests)
    assert caught.value.field == str(run.adapter / "weights")
    (run.adapter / "weights").unlink()
    with pytest.raises(FedspanError, match=r"the file is missing, and report\.json names it\. Restore the file\.?$"):
        require_same_files(run, digests, "report.json")


def test_a_model_is_checked_without_the_others_of_its_run(run: RunFolder, tmp_path: Path) -> None:
    """Through a link, too."""
    (tmp_path / "link").symlink_to(run.adapter / "east")
    require_intact_model(run.adapter)
    (run.adapter / "weights").write_text("other weights")
    for folder in (run.adapter / "east", tmp_path / "link"):
        require_intact_model(folder)
    with pytest.raises(FedspanError, match="the file was changed"):
        require_intact_model(run.adapter)
    (run.adapter / "east" / "weights").write_text("other weights")
    for folder in (run.adapter / "east", tmp_path / "link"):
        with pytest.raises(FedspanError, match=r"east/weights.*the file was changed"):
            require_intact_model(folder)


def test_a_model_outside_of_a_run_has_nothing_to_compare_with(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    require_intact_model(tmp_path / "adapter")
    require_intact_model(tmp_path / "missing")
