"""Files and folders: private ones, writes in parts, and cells of tables that spreadsheets would run."""

import csv
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fedspan.experiments.tables import Table, write_tables
from fedspan.files import make_private_folder, neutralize_formula, write_atomic
from fedspan.tasks.settings import TaskSettings
from helpers.command_line import done
from helpers.refusals import refused


@pytest.mark.skipif(os.name != "posix", reason="only POSIX has modes")
def test_a_private_folder_is_new_empty_or_private_already(tmp_path: Path) -> None:
    new, empty, own, shared = (tmp_path / name for name in ("a/new", "empty", "own", "a shared one"))
    for path, mode in ((empty, 0o755), (own, 0o700), (shared, 0o750)):
        path.mkdir()
        path.chmod(mode)
    for path in (own, shared):
        (path / "server.db").touch()
    for path in (new, empty, own):
        make_private_folder(path, "--folder")
        assert path.stat().st_mode & 0o777 == 0o700
    with refused("--folder"):
        make_private_folder(shared, "--folder")
    assert shared.stat().st_mode & 0o777 == 0o750  # whoever shares it decides
    with refused("folder"):
        make_private_folder(own / "server.db", "folder")


def test_a_write_that_takes_only_part_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    write_atomic(tmp_path / "file", b"0123456789")
    assert (tmp_path / "file").read_bytes() == b"0123456789"


FORMULA = '=HYPERLINK("http://192.0.2.1","look")'


@pytest.mark.parametrize("cell", [FORMULA, "+1+cmd|' /C calc'!A0", "-a", "@SUM(A1)", "\t=1", "\r=1", "-1-1"])
def test_formulas_become_text(cell: str) -> None:
    assert neutralize_formula(cell) == f"'{cell}"


@pytest.mark.parametrize("cell", ["", "-0.25", "+3", "-1e-5", "a=b", "label", "'=1"])
def test_numbers_and_other_texts_stay_as_they_are(cell: str) -> None:
    assert neutralize_formula(cell) == cell


def test_predictions_in_a_table_are_no_formulas(
    call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import fedspan

    monkeypatch.setattr(fedspan, "predict", lambda *_: [("=1+1", 0.5), ("lab", 0.25)])
    settings = TaskSettings("sequence-classification", ("lab", "admin"), 8, "accuracy")
    notes = {**asdict(settings), "base_model": "base", "client": None, "kept": []}
    (tmp_path / "fedspan.json").write_text(json.dumps(notes))
    (tmp_path / "texts.txt").write_text(f"{FORMULA}\n-2\n")
    lines = done(call("predict", tmp_path, "--file", tmp_path / "texts.txt")).splitlines()
    assert lines == [f"'=1+1\t0.5000\t'{FORMULA}", "lab\t0.2500\t-2"]


def test_the_table_of_a_comparison_has_no_formulas(tmp_path: Path) -> None:
    table = Table(("method",), (("fedit",),), None, ())
    write_tables(tmp_path, "title", table, [{"method": FORMULA, "score": -0.5, "note": None}], ["fedspan"], [])
    with (tmp_path / "table.csv").open(newline=os.linesep) as file:
        assert list(csv.DictReader(file)) == [{"method": f"'{FORMULA}", "score": "-0.5", "note": ""}]
