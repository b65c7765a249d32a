"""``fedspan predict`` and ``fedspan evaluate``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from helpers import tiny
from helpers.command_line import done

Call = Callable[..., Result]
Write = Callable[..., Path]


def test_predict(call: Call, finished: Path, tmp_path: Path) -> None:
    texts = ["admin1 admin2 word3", "symptom4 word1"]
    (tmp_path / "texts.txt").write_text("\n\n".join(texts))
    rows = json.loads(done(call("predict", finished, *texts, "--json")))
    assert [row["text"] for row in rows] == texts
    assert all(row["label"] in tiny.LABELS and 0.25 <= row["probability"] <= 1 for row in rows)
    expected = "".join(f"{row['label']}\t{row['probability']:.4f}\t{row['text']}\n" for row in rows)
    assert done(call("predict", finished, "--file", tmp_path / "texts.txt")) == expected
    assert done(call("predict", finished, "--file", "-", input="\n".join(texts))) == expected
    assert done(call("predict", finished, *texts, "--client", "west")) == expected


def test_predict_pairs(call: Call, finished: Path) -> None:
    assert done(call("predict", finished, "--pairs", "admin1\tword3")).endswith("\tadmin1 word3\n")


def test_personal_models_differ(call: Call, personal: Path) -> None:
    said = {client: done(call("predict", personal, "admin1 lab2", "--client", client)) for client in tiny.SITES}
    assert len(set(said.values())) == len(tiny.SITES)
    assert "one for each client" in (personal.parent / "screen.txt").read_text()


def test_clients_of_any_name_have_models(call: Call, write: Write, tiny_folder: Path, tmp_path: Path) -> None:
    names = {"east": "..", "north": "St. Mary's/North", "south": "süd " * 40, "west": "west"}
    rows = (tiny_folder / "corpus.csv").read_text().splitlines()
    for site, name in names.items():
        rows = [row.removesuffix(f",{site}") + f",{name}" if row.endswith(f",{site}") else row for row in rows]
    data = tmp_path / "corpus.csv"
    data.write_text("\n".join(rows))
    config = write(data={"train": str(data)}, method={"name": "fedsa-lora"}, federation={"rounds": 1})
    done(call("run", config, "--out", tmp_path / "run"))
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert set(report["adapters"]) == {name.strip() for name in names.values()}
    for client, where in report["adapters"].items():
        assert (tmp_path / "run" / where).parent == tmp_path / "run" / "adapter"
        assert done(call("predict", tmp_path / "run", "admin1", "--client", client))


def test_evaluate_measures_what_the_run_reported(call: Call, finished: Path, tiny_folder: Path) -> None:
    metrics = json.loads(done(call("evaluate", finished, "--json")))
    reported = json.loads((finished / "report.json").read_text())["scores"]["test"]
    assert metrics["accuracy"] == reported["accuracy"]
    assert metrics["macro_f1"] == pytest.approx(reported["macro_f1"])
    assert metrics["loss"] == pytest.approx(reported["loss"], abs=1e-5)
    shown = done(call("evaluate", finished))
    assert f"{100 * metrics['accuracy']:.1f}%" in shown
    whole = json.loads(done(call("evaluate", finished, "--data", tiny_folder / "corpus.csv", "--json")))
    assert whole["examples"] == sum(tiny.SITES.values())
