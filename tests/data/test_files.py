"""Formats of files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import datasets
import pandas as pd
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fedspan.data.loading import load
from helpers.written_data import CSV, ROWS, config_for, written


def write_as(folder: Path, suffix: str) -> Path:
    jsonl = "".join(json.dumps(row) + "\n" for row in ROWS)
    content = {"csv": CSV, "tsv": CSV.replace(",", "\t"), "jsonl": jsonl, "json": json.dumps(ROWS)}
    path = folder / f"train.{suffix}"
    kind, _, packed = suffix.partition(".")
    if kind == "parquet":
        pd.DataFrame(ROWS).astype({"label": "category"}).to_parquet(path)
    else:
        path.write_bytes(gzip.compress(content[kind].encode()) if packed else content[kind].encode())
    return path


@pytest.mark.parametrize(
    "suffix", ["csv", "tsv", "jsonl", "json", "parquet", "csv.gz", "tsv.gz", "jsonl.gz", "json.gz", "CSV"]
)
def test_every_format_gives_the_same_examples(tmp_path: Path, suffix: str) -> None:
    path = write_as(tmp_path, suffix.lower()).rename(tmp_path / f"train.{suffix}")
    data = load(config_for(path, test_fraction=0))
    assert data.labels == ("a", "b")
    assert data.test is None
    assert data.train.column_names == ["text", "label"]
    assert data.train.to_dict() == {"text": [row["text"] for row in ROWS], "label": [0, 1] * 5}
    assert data.train.features["label"] == datasets.Value("int64")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])).filter(str.strip), min_size=2, max_size=5))
@example(["two\u2028lines", "and\x85two\r\n"])
def test_any_text_survives_jsonl(tmp_path: Path, texts: list[str]) -> None:
    lines = "\n".join(json.dumps({"text": text, "label": row}, ensure_ascii=False) for row, text in enumerate(texts))
    assert load(config_for(written(tmp_path, "t.jsonl", lines), test_fraction=0)).train["text"][:] == texts


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_no_table_is_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """datasets hashes a table in memory by pickling it, in several times its size."""

    def refuse(dataset: object) -> str:
        raise AssertionError

    monkeypatch.setattr(datasets.arrow_dataset, "generate_fingerprint", refuse)
    data = load(config_for(write_as(tmp_path, suffix), test_fraction=0.5))
    assert data.test is not None
