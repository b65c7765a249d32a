"""``fedspan methods``, ``data``, ``partition`` and ``report``: what they list, and what a wrong key is told."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result

import fedspan
from fedspan.config import parse_config
from fedspan.data.catalogue import DatasetEntry, list_datasets
from fedspan.methods.describe import describe
from fedspan.methods.registry import METHODS
from fedspan.wrappers.describe import describe as describe_wrappers
from fedspan.wrappers.registry import WRAPPERS
from helpers import tiny
from helpers.command_line import done

Call = Callable[..., Result]


def test_methods(call: Call) -> None:
    shown = done(call("methods"))
    rows = json.loads(done(call("methods", "--json")))
    assert [(row["role"], row["key"]) for row in rows] == [
        *(("method", key) for key in sorted(METHODS)),
        *(("wrapper", key) for key in sorted(WRAPPERS)),
    ]
    for row in rows:
        assert row["key"] in shown
        assert row["cls"] == {**METHODS, **WRAPPERS}[row["key"]].__name__
    one = done(call("methods", "fedloru"))
    assert "method.tau" in one
    assert "rounds between accumulations" in one
    wrapper = done(call("methods", "fedprox"))
    assert "wrappers: [{name: fedprox, mu: 0.01}]" in wrapper
    assert "strength" in wrapper
    assert [row["key"] for row in json.loads(done(call("methods", "fedprox", "--json")))] == ["fedprox"]


def test_the_table_of_methods_is_that_of_the_registry() -> None:
    path = Path(fedspan.__file__).parent / "methods" / "table.json"
    assert json.loads(path.read_text()) == describe(), "write it anew: python -m fedspan.methods.describe"
    for row in describe():
        assert row["name"]
        assert row["idea"]


def test_the_table_of_wrappers_is_that_of_the_registry() -> None:
    path = Path(fedspan.__file__).parent / "wrappers" / "table.json"
    rows = describe_wrappers()
    assert json.loads(path.read_text()) == rows, "write it anew: python -m fedspan.wrappers.describe"
    for row in rows:
        assert row["name"]
        assert row["idea"]
        assert all(option["help"] for option in row["options"])
        assert all(option["help"] for option in row["options"]), f"describe each option of {row['cls']} under Args:"


def test_the_list_is_legible_in_80_columns(call: Call) -> None:
    result = call("data")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in result.stdout
    for entry in list_datasets():
        line = next(line for line in lines if line.split()[:1] == [entry.key])
        assert entry.metric in line
        assert entry.license in line
        if entry.hub is not None:
            assert entry.hub.id in line or entry.hub.id.split("/")[0] in line


@pytest.mark.parametrize("key", ["sst2", "cola", "gsm8k", "boolq", "mnist", "review-sentences", "patient-messages"])
def test_one_is_shown_with_configs_to_paste(call: Call, key: str) -> None:
    entry = next(entry for entry in list_datasets() if entry.key == key)
    result = call("data", key)
    assert result.exit_code == 0
    for shown in (entry.title, entry.metric, entry.license, entry.source, str(entry.rows.train)):
        assert shown in result.stdout
    pasted = [part.split("\n\n")[0] for part in result.stdout.split("\n  data:\n")[1:]]
    assert len(pasted) == {"boolq": 1, "review-sentences": 1, "patient-messages": 1}.get(key, 2)
    for part in pasted:
        config = parse_config(yaml.safe_load(f"  data:\n{part}"))
        assert (config.data.dataset, config.task) == (key, entry.task)


def test_json_holds_all_there_is_to_know(call: Call) -> None:
    content = json.loads(call("data", "--json").stdout)
    assert tuple(DatasetEntry.model_validate(entry) for entry in content) == list_datasets()
    (one,) = json.loads(call("data", "mrpc", "--json").stdout)
    assert (one["key"], one["files"]["columns"]["text"]) == ("mrpc", "#1 String")


def test_partition_says_what_was_left_out(call: Call, tmp_path: Path) -> None:
    rows = [{"text": "" if row == 3 else f"text {row}", "label_text": "ab"[row % 2]} for row in range(20)]
    (tmp_path / "groups.json").write_text(json.dumps(rows))
    data = {"dataset": "20newsgroups", "train": str(tmp_path / "groups.json")}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"data": data, "partition": {"clients": 2}}))
    result = call("partition", tmp_path / "run.yaml")
    assert result.exit_code == 0
    assert "rows left out (data.invalid: skip): 1 without a text" in result.stdout
    assert json.loads(call("partition", tmp_path / "run.yaml", "--json").stdout)["dropped"] == 1


Write = Callable[..., Path]


def test_partition(call: Call, write: Write, tmp_path: Path) -> None:
    config, png = write(), tmp_path / "p.png"
    shown = done(call("partition", config, "--png", png))
    content = json.loads(done(call("partition", config, "--json")))
    assert png.read_bytes().startswith(b"\x89PNG")
    assert content["labels"] == list(tiny.LABELS)
    assert [client["id"] for client in content["clients"]] == sorted(tiny.SITES)
    for client in content["clients"]:
        line = next(line for line in shown.splitlines() if line.startswith(client["id"]))
        assert f"{client['train']}+{client['validation']}+{client['test']}" in line
        assert [0 if cell == "." else int(cell) for cell in line.split()[2:]] == client["counts"]
        assert sum(client["counts"]) == client["train"] + client["validation"] + client["test"]
    assert max(map(len, shown.replace(str(png), "").splitlines())) <= 80


def test_partition_with_many_labels(call: Call, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    partition = {"partitioner": "dirichlet", "alpha": 0.3}
    config.write_text(yaml.safe_dump({"data": {"train": "builtin:patient-messages"}, "partition": partition}))
    twenty = done(call("partition", config))
    assert "20 waiting_list" in twenty
    rows = [f"text {number},a_label_with_a_long_name_{number % 77:02}" for number in range(770)]
    (tmp_path / "many.csv").write_text("text,label\n" + "\n".join(rows))
    many = done(call("partition", config, "--set", f"data.train={tmp_path / 'many.csv'}"))
    assert "most frequent" in many
    assert max(map(len, (twenty + many).splitlines())) <= 80


def test_a_report_gets_its_options(call: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def report(runs: list[Path], out: Path, *, diagnostics: bool, data: bool) -> Path:
        calls.append((runs, out, diagnostics, data))
        (tmp_path / "page.html").write_bytes(bytes(2_340_000))
        return tmp_path / "page.html"

    monkeypatch.setattr(fedspan, "report", report)
    result = call("report", "runs/first")
    assert result.exit_code == 0, result.output
    assert "".join(result.output.split()).startswith("wrote" + str(tmp_path / "page.html"))
    assert "(2.3 MB)" in " ".join(result.output.split())
    assert call("report", "a", "b", "--out", "both.html", "--diagnose", "--no-data").exit_code == 0
    assert calls == [
        ([Path("runs/first")], Path("report.html"), False, True),
        ([Path("a"), Path("b")], Path("both.html"), True, False),
    ]


def test_a_run_that_is_missing_is_named(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "there is no folder" in refused("report", tmp_path / "missing", "--out", tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
