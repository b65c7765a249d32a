"""``fedspan data``: the list, one entry with configs to paste, JSON, and what a wrong key is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import Result

from fedspan.config import parse_config
from fedspan.data.catalogue import DatasetEntry, list_datasets

Call = Callable[..., Result]
Refused = Callable[..., str]


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


@pytest.mark.parametrize("key", ["sst2", "cola", "gsm8k", "boolq", "mnist", "banking-queries", "patient-messages"])
def test_one_is_shown_with_configs_to_paste(call: Call, key: str) -> None:
    entry = next(entry for entry in list_datasets() if entry.key == key)
    result = call("data", key)
    assert result.exit_code == 0
    for shown in (entry.title, entry.metric, entry.license, entry.source, str(entry.rows.train)):
        assert shown in result.stdout
    pasted = [part.split("\n\n")[0] for part in result.stdout.split("\n  data:\n")[1:]]
    assert len(pasted) == {"boolq": 1, "banking-queries": 1, "patient-messages": 1}.get(key, 2)
    for part in pasted:
        config = parse_config(yaml.safe_load(f"  data:\n{part}"))
        assert (config.data.dataset, config.task) == (key, entry.task)


def test_json_holds_all_there_is_to_know(call: Call) -> None:
    content = json.loads(call("data", "--json").stdout)
    assert tuple(DatasetEntry.model_validate(entry) for entry in content) == list_datasets()
    (one,) = json.loads(call("data", "mrpc", "--json").stdout)
    assert (one["key"], one["files"]["columns"]["text"]) == ("mrpc", "#1 String")


def test_an_unknown_key_is_told_the_nearest(refused: Refused) -> None:
    assert refused("data", "sst").endswith("Did you mean 'sst2', 'stsb' or 'mnist'?")


def test_partition_says_what_was_left_out(call: Call, tmp_path: Path) -> None:
    rows = [{"text": "" if row == 3 else f"text {row}", "label_text": "ab"[row % 2]} for row in range(20)]
    (tmp_path / "groups.json").write_text(json.dumps(rows))
    data = {"dataset": "20newsgroups", "train": str(tmp_path / "groups.json")}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"data": data, "partition": {"clients": 2}}))
    result = call("partition", tmp_path / "run.yaml")
    assert result.exit_code == 0
    assert "rows left out (data.invalid: skip): 1 without a text" in result.stdout
    assert json.loads(call("partition", tmp_path / "run.yaml", "--json").stdout)["dropped"] == 1
