"""Files as users have them, each from ``fedspan init`` to a prediction with the config that it wrote."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedspan.runs.folder import RunFolder
from fedspan.runs.start import load_partition
from helpers.families import others_slow

Call = Callable[..., Any]
ROWS = 60
LABELS = ("Bürokratie", "Größe", "Überweisung")
TEXTS = [
    f"{kind}{number % 9} word{number % 7} Café" for number in range(ROWS // 3) for kind in ("admin", "lab", "pain")
]


def as_csv(*, delimiter: str = ",", header: bool = True, end: str = "\n") -> str:
    file = io.StringIO()
    rows = csv.writer(file, delimiter=delimiter, lineterminator=end)
    if header:
        rows.writerow(["Nachricht", "Kategorie"])
    rows.writerows([text, LABELS[number % 3]] for number, text in enumerate(TEXTS))
    return file.getvalue()


def as_nested_jsonl() -> str:
    rows = [{"text": text, "meta": {"label": LABELS[number % 3]}} for number, text in enumerate(TEXTS)]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


FILES = {
    "excel.csv": as_csv(delimiter=";", end="\r\n").encode("utf-8-sig"),
    "latin1.csv": as_csv().encode("latin-1"),
    "nested.jsonl": as_nested_jsonl().encode(),
    "headerless.csv": as_csv(header=False).encode(),
}


@pytest.mark.parametrize("name", others_slow(FILES, ["headerless.csv", "excel.csv"]))
def test_from_a_file_to_a_prediction(name: str, call: Call, tiny_folder: Path, tmp_path: Path) -> None:
    data, config, run = tmp_path / name, tmp_path / "config.yaml", tmp_path / "run"
    data.write_bytes(FILES[name])
    first = call("init", data, "--out", config, "--clients", 2, "--model", tiny_folder / "bert")
    assert first.exit_code == 0, first.output
    held_out = ROWS // 5
    assert f"{ROWS} examples, {held_out} of them held out for testing" in " ".join(first.output.split())
    trained = call("run", config, "--out", run, "--set", "federation.rounds=1")
    assert trained.exit_code == 0, trained.output
    divided = load_partition(RunFolder(run))
    assert divided is not None
    used = sum(len(one.train) + len(one.validation) + len(one.test) for one in divided.clients)
    assert used == ROWS - held_out
    predicted = call("predict", run, TEXTS[0], "--json")
    assert predicted.exit_code == 0, predicted.output
    (row,) = json.loads(predicted.stdout)
    assert json.loads((run / "adapter" / "fedspan.json").read_text(encoding="utf-8"))["labels"] == sorted(LABELS)
    assert row["label"] in LABELS
    assert 1 / len(LABELS) <= row["probability"] <= 1
