"""Tables of a series: numbers as they are shown, Markdown and CSV, and where the numbers come from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedspan.errors import FedspanError
from fedspan.experiments.tables import (
    Table,
    format_heading,
    format_markdown,
    format_mean,
    format_megabytes,
    format_seconds,
    format_size,
    write_tables,
)
from fedspan.runs.folder import RunFolder

TABLE = Table(("method", "accuracy"), (("fedit", "95.4"), ("a|b", "")), 1, ("first note", "last note"))


def test_metrics_in_percent_have_one_decimal_and_others_four() -> None:
    assert format_heading("best", "accuracy") == "best accuracy, %"
    assert "%" not in format_heading("best", "loss")
    assert format_mean("accuracy", 0.9543, 0.0071) == "95.4 ± 0.7"
    assert format_mean("accuracy", 0.9543, None, sign=True) == "+95.4"
    assert format_mean("accuracy", -0.01, None, sign=True) == "-1.0"
    assert format_mean("loss", 0.5, 0.25) == "0.5000 ± 0.2500"
    assert format_mean("loss", None, 0.25) == "-"


def test_bytes_and_seconds() -> None:
    assert [format_megabytes(n) for n in (None, 0, 1_234_567, 12_345_678)] == ["-", "0.000", "1.235", "12.3"]
    assert [format_seconds(value) for value in (None, 0.0, 61.26)] == ["-", "0.0", "61.3"]
    sizes = (0, 999, 1000, 1_250_000, 99_940_000, 999_600_000, 3.2e12)
    assert [format_size(n) for n in sizes] == ["0 B", "999 B", "1.0 kB", "1.2 MB", "99.9 MB", "1.0 GB", "3.2 TB"]


def test_markdown_has_the_best_row_in_bold_and_no_cell_that_ends_a_column() -> None:
    assert format_markdown(TABLE) == [
        "| method | accuracy |",
        "|---|---:|",
        "| fedit | 95.4 |",
        "| **a\\|b** |  |",
        "",
        "first note  ",
        "last note",
    ]


def run(folder: Path, fingerprint: str, torch: str = "2.8") -> None:
    files = RunFolder(folder)
    folder.mkdir()
    files.write_json(files.environment, {"platform": "Linux", "threads": 2, "torch": torch, "seed": 1, "command": []})
    files.write_json(files.partition, {"fingerprint": fingerprint})
    files.report.touch()
    os.utime(files.report, (0, 86400 * 365))


def test_a_table_states_its_command_machine_and_partition(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run(tmp_path / name, "f" * 64)
    plain = [{"method": "fedit", "accuracy": 0.954}, {"method": "a,b", "accuracy": None}]
    write_tables(tmp_path, "Title", TABLE, plain, ["fedspan", "compare", "my config"], ["a", "b"], TABLE)
    assert (tmp_path / "table.csv").read_text() == 'method,accuracy\nfedit,0.954\n"a,b",\n'
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert lines[:6] == [
        "# Title",
        "",
        "Command: `fedspan compare 'my config'`  ",
        "Date: 1971-01-01.  ",
        "Machine: Linux, threads 2; torch 2.8.  ",
        f"Same partition of the data in all runs: {'f' * 16}.",
    ]
    assert lines.count("| method | accuracy |") == 2
    run(tmp_path / "c", "f" * 64, torch="2.9")
    write_tables(tmp_path, "Title", TABLE, plain, [], ["a", "c"])
    assert "Also on: Linux, threads 2; torch 2.9.  " in (tmp_path / "table.md").read_text().splitlines()


def test_runs_of_different_data_have_no_common_table(tmp_path: Path) -> None:
    run(tmp_path / "a", "f" * 64)
    run(tmp_path / "b", "e" * 64)
    with pytest.raises(FedspanError, match="b and a have different partitions, because the data changed"):
        write_tables(tmp_path, "Title", TABLE, [{"method": "fedit"}], [], ["a", "b"])
    assert not (tmp_path / "table.md").exists()
