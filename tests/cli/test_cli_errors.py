"""What a user can get wrong is answered on one line that names field, value and remedy, with exit code 2."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Refused = Callable[..., str]
Write = Callable[..., Path]


@pytest.mark.parametrize(
    ("setting", "field", "remedy"),
    [
        ("method.name=fedot", "`method.name`: ", "Did you mean 'fedit'"),
        ("method.tau=3", "`method.tau`: ", "Its options are r, lora_alpha"),
        ("method.r=zwei", "`method.r`: ", "integer"),
        ("method.r=17", "`method.r`: ", "larger than a target layer"),
        ("model.target_modules=[quary]", "`model.target_modules`: ", "Did you mean 'query'"),
        ("model.name=nowhere/nothing", "`model.name`: ", "a local folder with a model"),
        ("partition.clients=500", "`partition.clients`: ", "108"),
        ("data.label=lable", "`data.label`: no column named 'lable'", "Did you mean 'label'?"),
        ("data.train=missing.csv", "`data.train`: ", "there is no file 'missing.csv'"),
        ("training.lr=1e6", "`training.lr`: ", "a lower learning rate"),
        ("training.lr=inf", "`training.lr`: ", "a number above 0, or auto"),
        ("training.learning_rate=1", "`training.learning_rate`: ", "no such field. Did you mean"),
        ("device=tpu", "`device`: ", "cpu, cuda"),
        ("method.r", "`--set`: ", "section.field=value"),
        ("=3", "`--set`: ", "section.field=value"),
        ("seed.value=3", "`--set`: ", "seed is a value, not a section"),
        ("seed=[", "`--set`: ", "valid YAML"),
    ],
)
def test_mistakes_in_a_config(
    refused: Refused, write: Write, tmp_path: Path, setting: str, field: str, remedy: str
) -> None:
    config = write(partition={"partitioner": "iid", "column": None, "clients": 4})
    said = refused("run", config, "--out", tmp_path / "run", "--set", setting)
    assert said.startswith(field)
    assert remedy in said


@pytest.mark.slow  # a process of its own
def test_a_wrong_config_is_refused_before_transformers_are_loaded(write: Write, tmp_path: Path) -> None:
    config, out = str(write(federation={"rounds": -1})), ["--out", str(tmp_path / "out")]
    commands = {
        "run": ["run", config, *out],
        "compare": ["compare", config, "--methods", "fedit,rolora", *out],
        "sweep": ["sweep", config, "--over", "training.lr=1e-3,1e-2", *out],
        "plan": ["plan", config],
    }
    script = f"""
import sys
from fedspan.cli import app
for name, arguments in {commands!r}.items():
    assert app(arguments, standalone_mode=False) == 2, name
    loaded = {{"transformers", "peft", "accelerate", "datasets"}} & sys.modules.keys()
    assert not loaded, (name, loaded)
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stderr.count("`federation.rounds`: -1") == len(commands)
    assert not (tmp_path / "out").exists()


def test_a_label_of_the_test_set_that_training_lacks(refused: Refused, write: Write, tmp_path: Path) -> None:
    test = tmp_path / "test.csv"
    test.write_text("text,label\nword1 admin1,admin\nword2,gossip\n")
    said = refused("run", write(data={"test": str(test)}), "--out", tmp_path / "run")
    assert [part for part in ("`data.test`: ", "gossip", "row 3 of") if part not in said] == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no file"),
        ("a: [1, 2\nb: {", "valid YAML"),
        ("just text", "a YAML mapping"),
        ("methd: {name: fedit}\ndata: {train: x.csv}\n", "Did you mean 'method'"),
        ("method: {name: fedit}\n", "is required"),
    ],
)
def test_files_that_are_no_config(refused: Refused, tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_text(content)
    assert said in refused("run", path)


def test_run_without_and_with_too_much(refused: Refused, stopped: Path, write: Write) -> None:
    assert refused("run").startswith("`CONFIG`: no value is given. Expected a YAML file, or --resume FOLDER")
    config = write()
    assert refused("run", config, "--resume", stopped).startswith("`CONFIG`: it cannot be combined with --resume")
    assert refused("run", "--out", "x", "--resume", stopped).startswith("`--out`: it cannot be combined")
    assert refused("run", "--set", "seed=1", "--resume", stopped).startswith("`seed`: the config with which this run")


def test_folders_that_are_no_place_for_a_run(refused: Refused, write: Write, stopped: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").touch()
    said = refused("run", write(), "--out", tmp_path / "taken")
    assert said.startswith(f"`run folder`: '{tmp_path / 'taken'}' holds other files (thesis.tex)")
    missing = write(model={"name": "nobody/no-such-model"})  # the folder is inspected before a model is loaded
    assert "thesis.tex" in refused("run", missing, "--out", tmp_path / "taken")
    assert "already holds a run" in refused("run", write(), "--out", stopped)
    assert "holds no run" in refused("run", "--resume", tmp_path / "taken")
    assert "there is no folder" in refused("run", "--resume", tmp_path / "nothing")


def test_a_second_process_on_the_same_run(refused: Refused, stopped: Path) -> None:
    script = "import sys; from fedspan.runs.folder import RunFolder as R\nwith R.resume(sys.argv[1]): print(); input()"
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(stopped)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout is not None
        other.stdout.readline()
        said = refused("run", "--resume", stopped)
        other.communicate("\n")
    assert f"process {other.pid} is working on this run" in said


def test_a_damaged_checkpoint(refused: Refused, stopped: Path) -> None:
    damaged = stopped / "checkpoints" / "round-00001"
    tensors = max(damaged.iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(tensors.read_bytes())
    content[len(content) // 2] ^= 1
    tensors.write_bytes(content)
    said = refused("run", "--resume", stopped)
    assert tensors.name in said
    assert "Start again" in said


def test_unknown_clients(refused: Refused, finished: Path, personal: Path, tmp_path: Path) -> None:
    assert refused("predict", finished, "word1", "--client", "weast").startswith(
        f"`client`: {finished} has no client 'weast'"
    )
    assert "Did you mean 'west'" in refused("predict", finished, "word1", "--client", "weast")
    assert refused("predict", personal, "word1").startswith("`client`: no value is given. Expected one of east, north")
    assert "has no client 'weast'" in refused("evaluate", personal, "--client", "weast")
    assert "has no client 'weast'" in refused("export", personal, "--client", "weast", "--out", tmp_path / "out")


def test_folders_without_a_model(refused: Refused, stopped: Path, tmp_path: Path) -> None:
    assert "there is no folder" in refused("predict", tmp_path / "nothing", "word1")
    assert "fedspan.json" in refused("predict", tmp_path, "word1")
    assert "this run is not finished" in refused("predict", stopped, "word1")
    assert "this run is not finished" in refused("evaluate", stopped)


def test_adapters_that_were_damaged(refused: Refused, call: Callable[..., Any], finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "adapter"
    assert call("export", finished, "--out", out).exit_code == 0
    assert refused("evaluate", out).startswith("`data`: no data are given")
    assert refused("predict", out, "word1", "--client", "east").startswith("`client`: this model is ")
    (out / "adapter_model.safetensors").write_bytes(b"no tensors")
    assert "PEFT cannot read this adapter" in refused("predict", out, "word1")
    (out / "adapter_config.json").write_text("{")
    assert "PEFT cannot read this adapter" in refused("predict", out, "word1")
    (out / "fedspan.json").write_text("{")
    assert "fedspan.json" in refused("predict", out, "word1")
    (out / "fedspan.json").write_text("{}")
    assert "labels, max_length" in refused("predict", out, "word1")


def test_exports_that_cannot_be(refused: Refused, finished: Path, tmp_path: Path) -> None:
    assert refused("export", finished, "--out", finished).startswith(
        f"`out`: '{finished}' is not accepted. Expected an empty folder"
    )
    assert refused("export", finished, "--out", tmp_path / "x", "--round", "7").startswith(
        "`round`: 7 is not accepted. Expected best, last"
    )
    assert refused("export", finished, "--out", tmp_path / "x", "--round", "all").startswith(
        "`round`: 'all' is not accepted. Expected best, last"
    )
    (tmp_path / "file").touch()
    assert refused("export", finished, "--out", tmp_path / "file" / "x").startswith("`out`: ")


def test_texts_that_are_missing(refused: Refused, finished: Path, tmp_path: Path) -> None:
    assert refused("predict", finished).startswith("`TEXT`: no value is given. Expected texts to label")
    assert refused("predict", finished, "--file", tmp_path / "no.txt").startswith("`--file`: ")
    (tmp_path / "empty.txt").write_text("\n\n")
    assert "the file is empty" in refused("predict", finished, "--file", tmp_path / "empty.txt")
    assert refused("predict", finished, "--pairs", "one text").startswith(
        "`--pairs`: 'one text' is not accepted. Expected two texts separated by a tab"
    )


def test_files_that_cannot_be_measured_on(refused: Refused, finished: Path, tmp_path: Path) -> None:
    path = tmp_path / "new.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["message", "intent"], ["word1 admin1", "admin"], ["word2", "gossip"]])
    assert refused("evaluate", finished, "--data", path).startswith("`text`: no column named 'text' in ")
    assert refused("evaluate", finished, "--data", path, "--text", "message").startswith(
        "`label`: no column named 'label' in "
    )
    said = refused("evaluate", finished, "--data", path, "--text", "message", "--label", "intent")
    assert [
        part for part in ("`data`: ", "gossip", f"row 3 of {path}", "not in the model's labels") if part not in said
    ] == []
    assert refused("evaluate", finished, "--data", tmp_path / "no.csv").startswith("`data`: ")


def test_a_picture_that_cannot_be_written(refused: Refused, write: Write, tmp_path: Path) -> None:
    assert refused("partition", write(), "--png", tmp_path / "no" / "p.png").startswith("`--png`: ")


def test_unknown_method_to_look_at(refused: Refused) -> None:
    said = refused("methods", "fedsa")
    assert said.startswith("`METHOD`: no method or wrapper is named 'fedsa'")
    assert "fedsa-lora" in said
