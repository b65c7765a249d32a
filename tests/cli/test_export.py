"""``fedspan export``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from click.testing import Result

from helpers import tiny
from helpers.command_line import done

Call = Callable[..., Result]


@pytest.mark.parametrize("form", ["adapter", "merged"])
def test_export(call: Call, finished: Path, tiny_folder: Path, tmp_path: Path, form: str) -> None:
    out = tmp_path / "deep" / form
    assert done(call("export", finished, "--out", out, "--form", form)) == f"wrote {out}\n"
    assert [path.name for path in out.parent.iterdir()] == [form]
    data = ("--data", tiny_folder / "corpus.csv", "--json")
    there = json.loads(done(call("evaluate", finished, *data)))
    here = json.loads(done(call("evaluate", out, *data)))
    assert here == pytest.approx(there, abs=1e-5)
    assert done(call("predict", out, "lab1 word2")) == done(call("predict", finished, "lab1 word2"))
    if form == "merged":
        model = transformers.AutoModelForSequenceClassification.from_pretrained(out)
        assert model.config.id2label == dict(enumerate(tiny.LABELS))
        assert model.config.hidden_dropout_prob == 0.1
        assert transformers.AutoTokenizer.from_pretrained(out)("lab1").input_ids


def test_export_of_a_client(call: Call, personal: Path, tmp_path: Path) -> None:
    out = tmp_path / "theirs"
    done(call("export", personal, "--out", out, "--client", "north"))
    expected = done(call("predict", personal, "admin1 lab2", "--client", "north"))
    assert done(call("predict", out, "admin1 lab2")) == expected
    assert done(call("predict", out, "admin1 lab2", "--client", "north")) == expected


def test_export_of_a_round(call: Call, finished: Path, stopped: Path, tmp_path: Path) -> None:
    """From checkpoints: of a run that is not finished, and of rounds that were not the best."""
    name = "adapter_model.safetensors"
    for round in ("best", "last", "1"):
        done(call("export", stopped, "--out", tmp_path / round, "--round", round))
    done(call("export", finished, "--out", tmp_path / "first", "--round", "1"))
    done(call("export", finished, "--out", tmp_path / "second", "--round", "2"))
    first = (tmp_path / "first" / name).read_bytes()
    assert all((tmp_path / round / name).read_bytes() == first for round in ("best", "last", "1"))
    assert (tmp_path / "second" / name).read_bytes() != first
