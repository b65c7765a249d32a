"""The data that come with the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedspan.data.builtin import CORPORA
from fedspan.data.loading import load
from helpers.written_data import config_for, written


def test_the_built_in_corpus_is_named_and_has_a_test_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedspan.data.builtin.files", lambda package: tmp_path)
    folder = tmp_path / "corpus" / CORPORA["patient-messages"].folder
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        written(folder, f"{split}.csv", f"text,label\n{split} one,a\n{split} two,b\n")
    data = load(config_for("builtin:patient-messages"))
    assert data.train["text"][0] == "train one"
    assert data.test is not None
    assert data.test["text"][0] == "test one"


@pytest.mark.parametrize("name", CORPORA)
def test_the_corpora_that_come_with_the_package_are_whole(name: str) -> None:
    data = load(config_for(f"builtin:{name}"))
    assert len(data.labels) == 20
    assert data.test is not None
    assert set(data.train["label"]) == set(data.test["label"]) == set(range(len(data.labels)))
