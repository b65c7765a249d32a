"""``fedspan run`` and ``demo``: rounds, the last screen, resuming, and the same adapter after Ctrl-C or a kill."""

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import yaml
from click.testing import Result
from rich.console import Console
from safetensors.numpy import save_file

import fedspan
from fedspan.cli.run_summary import render_peft_snippet, show_report
from fedspan.cli.train import find_unused_folder
from fedspan.progress.view import RunView
from fedspan.run_folder import RunFolder
from fedspan.runs.report import RunReport
from helpers import tiny_decoders
from helpers.command_line import Call, done


def test_run_shows_every_round_and_closes_with_the_comparison(finished: Path) -> None:
    screen = (finished.parent / "screen.txt").read_text()
    report = json.loads((finished / "report.json").read_text())
    for round in (1, 2):
        assert f" {round}/2 " in screen
    for shown in ("fedit", "local-only", "centralized", "held-out", "client tests", "worst client"):
        assert shown in screen
    assert f"{100 * report['scores']['test']['accuracy']:.1f}%" in screen
    assert "head_init" not in report["start"]  # its head is random
    starts = [line for line in screen.splitlines() if line.strip().startswith("start ")]
    assert len(starts) == 2  # in the table of rounds and in the comparison
    assert all(f"{100 * report['start']['test']['accuracy']:.1f}%" in line for line in starts)
    assert str(finished / "adapter") in screen.replace("\n", "")
    assert "kB down" in screen
    for row in report["examples"]:
        assert row["text"].split()[0] in screen
    lines = screen.splitlines()
    warnings = [f"warning: {warning}" for warning in report["warnings"]]
    assert [line for line in lines if line.startswith("warning: ")] == warnings  # each on one line, however long
    assert max(len(line) for line in lines if "/" not in line and line not in warnings) <= 80


def test_the_snippet_that_it_closes_with_loads_the_adapter(finished: Path, personal: Path) -> None:
    for folder, head in ((finished, "classifier"), (personal, "classifier")):
        screen = (folder.parent / "screen.txt").read_text()
        lines = [line.strip() for line in screen.splitlines() if "import peft" in line or "from_pretrained" in line]
        assert len(lines) == 3
        names: dict[str, Any] = {}
        exec("\n".join(lines), names)
        assert isinstance(names["model"], peft.PeftModel)
        assert head in names["model"].peft_config["default"].modules_to_save


def test_the_snippet_of_an_encoder_from_a_package_needs_no_hub(tmp_path: Path) -> None:
    """PEFT would look for the base by its hub id."""
    notes = {"pooling": {"mode": "mean"}, "task": "regression", "base_model": "builtin:all-minilm-l6-v2"}
    (tmp_path / "fedspan.json").write_text(json.dumps(notes))
    assert "fedspan.export" not in "".join(render_peft_snippet(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    lines = render_peft_snippet(tmp_path)
    assert lines[1] == f'fedspan.export("{tmp_path}", "merged", form="merged")'
    assert lines[3] == 'model = sentence_transformers.SentenceTransformer("merged")'


def test_resume_continues_to_the_same_adapter(call: Call, stopped: Path, finished: Path) -> None:
    screen = done(call("run", "--resume", stopped))
    assert "resumed after round 1 of 2" in screen
    assert " 1/2 " in screen
    name = Path("adapter") / "adapter_model.safetensors"
    assert (stopped / name).read_bytes() == (finished / name).read_bytes()


def test_resume_says_what_changed_since(call: Call, stopped: Path) -> None:
    environment = json.loads((stopped / "environment.json").read_text())
    (stopped / "environment.json").write_text(json.dumps({**environment, "torch": "1.0"}))
    assert "note: torch was 1.0 and is " in done(call("run", "--resume", stopped))


def test_resume_of_a_finished_run_shows_its_report_again(call: Call, finished: Path) -> None:
    began = (finished / "report.json").stat().st_mtime_ns
    screen = done(call("run", "--resume", finished))
    assert screen.strip() in (finished.parent / "screen.txt").read_text()
    assert (finished / "report.json").stat().st_mtime_ns == began


def test_a_language_model_closes_with_prompts_and_answers(call: Call, decoders: Path, tmp_path: Path) -> None:
    config = tmp_path / "lm.yaml"
    config.write_text(yaml.safe_dump(tiny_decoders.settings(decoders, federation={"rounds": 1})))
    result = call("run", config, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    for row in report["examples"]:
        for name, key in (("prompt", "text"), ("answer", "label"), ("model", "prediction")):
            assert f"{name:<8}{row[key]}".rstrip() in [line.rstrip() for line in result.stdout.splitlines()]
    assert "AutoModelForCausalLM" in result.stdout
    for shown in ("perplexity", "match", "measured by loss"):
        assert shown in " ".join(result.stdout.split())


TEST: Mapping[str, Any] = {"accuracy": 0.75, "worst": {"client": "north", "accuracy": 0.5}}


def read_screen(scores: Mapping[str, Any], folder: Path = Path("runs/first")) -> list[str]:
    report = RunReport("FedIT", "sequence-classification", "accuracy", 3, 2, scores, {}, {"down": 0, "up": 0}, 1.0)
    out = io.StringIO()
    show_report(Console(file=out, width=100), report, folder)
    return [line.strip() for line in out.getvalue().splitlines() if line.strip()]


@pytest.mark.parametrize(
    ("scores", "columns", "cells"),
    [
        ({"test": TEST, "validation": {"accuracy": 0.8}}, ["held-out", "held-out"], ["75.0%", "north", "50.0%"]),
        ({"clients": TEST}, ["client", "tests", "client", "tests"], ["75.0%", "north", "50.0%"]),
        ({"validation": {"accuracy": 0.8}}, ["validation"], ["80.0%"]),
    ],
)
def test_scores_are_of_tests_or_of_validation(scores: Mapping[str, Any], columns: list[str], cells: list[str]) -> None:
    lines = read_screen(scores)
    assert lines[0].split() == columns
    assert next(line for line in lines if line.startswith("FedIT")).split()[1:] == cells
    assert ("so it is too good on average" in " ".join(lines)) == (columns == ["validation"])


def test_a_result_below_the_majority_class_is_the_first_sentence(tmp_path: Path) -> None:
    predictions = {"targets": np.array([0, 0, 0, 1], np.int32), "predicted": np.array([[1, 0, 0, 0]], np.int32)}
    metadata = {"fedspan": json.dumps({"labels": ["a", "b"], "examples": "one"})}
    (tmp_path / "predictions").mkdir()
    save_file(predictions, tmp_path / "predictions" / "result.safetensors", metadata)
    first = "The result is below the majority class: it is worse than always predicting one label."
    for accuracy in (0.5, 0.75):
        lines = read_screen({"test": {"accuracy": accuracy}}, tmp_path)
        sentences = [line for line in lines if line.endswith(".") and "majority" in line.lower()]
        assert (sentences[0] == first) == (accuracy < 0.75)
        assert sentences[-1] == "Majority class: 75.0 % of the held-out examples have the most frequent label."


def test_without_scores_there_is_a_sentence_and_no_table() -> None:
    lines = read_screen({})
    assert lines[0].startswith("no scores were measured: there is no test set")
    assert not any(line.startswith("FedIT") for line in lines)


def test_run_chooses_a_new_folder(tmp_path: Path) -> None:
    assert find_unused_folder(tmp_path / "demo") == tmp_path / "demo"
    (tmp_path / "demo").mkdir()
    assert find_unused_folder(tmp_path / "demo") == tmp_path / "demo-2"
    (tmp_path / "demo-2").mkdir()
    assert find_unused_folder(tmp_path / "demo") == tmp_path / "demo-3"


@pytest.mark.slow  # a step of its own in .ci/run, too
def test_demo(call: Call, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    changes = [
        f"model.name={tiny_folder / 'bert'}",
        "model.layers_to_transform=null",
        "method.r=2",
        "data.max_examples=40",
        "partition.clients=3",
        "partition.min_examples=4",
        "federation.rounds=1",
        "baselines=[]",
    ]
    settings = [part for change in changes for part in ("--set", change)]
    for folder in ("demo", "demo-2"):
        shown = " ".join(done(call("demo", *settings)).split())
        assert f"runs/{folder}/adapter" in shown
        assert "In the federation, no example left its client: the clients sent " in shown
        assert f"runs/{folder}/report.html" in shown
        assert (tmp_path / "runs" / folder / "report.json").is_file()
        assert (tmp_path / "runs" / folder / "report.html").is_file()


def test_demo_shows_its_config(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(done(call("demo", "--show-config")))
    config = fedspan.load_config(path)
    assert config.model.name == "builtin:all-minilm-l6-v2"
    assert config.data.train == "builtin:review-sentences"
    assert (config.method.name, config.baselines) == ("fedit", ["local-only"])


@pytest.fixture(scope="module")
def config(write: Callable[..., Path]) -> Path:
    return write(federation={"rounds": 8}, training={"optimizer_state": "keep"}, evaluation={"every": 2})


def adapter(folder: Path) -> bytes:
    return (folder / "adapter" / "adapter_model.safetensors").read_bytes()


def test_ctrl_c_between_rounds_says_how_to_continue(
    config: Path, call: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, folder, finished = tmp_path / "whole", tmp_path / "my run", RunView.on_round_finish
    rounds = ("--set", "federation.rounds=4")
    assert call("run", config, *rounds, "--out", whole).exit_code == 0

    def interrupt(self: RunView, row: Mapping[str, Any]) -> None:
        finished(self, row)
        if row["round"] == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunView, "on_round_finish", interrupt)
        stopped = call("run", config, *rounds, "--out", folder)
    assert stopped.exit_code == 130, stopped.output
    done = int(stopped.stderr.partition("stopped; ")[2].partition(" of 4 rounds are saved")[0])
    assert done in (2, 3)
    assert stopped.stderr.endswith(f"Resume with:\n  fedspan run --resume '{folder}'\n")
    resumed = call("run", "--resume", folder)
    assert resumed.exit_code == 0, resumed.output
    assert f"resumed after round {done} of 4" in resumed.output
    assert adapter(folder) == adapter(whole)


@pytest.mark.slow
def test_killed_at_moments_spread_over_a_run(config: Path, call: Callable[..., Result], tmp_path: Path) -> None:
    """The interpreter itself is killed: while loading, and after so many rounds."""
    folder, metrics = tmp_path / "run", RunFolder(tmp_path / "run").metrics
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}

    def start() -> subprocess.Popen[bytes]:
        begun = (folder / "config.yaml").exists()
        what = ["--resume", str(folder)] if begun else [str(config), "--out", str(folder)]
        return subprocess.Popen([sys.executable, "-m", "fedspan", "run", *what], env=environment)

    for round in (0, 2, 5):
        with start() as process:
            while process.poll() is None and (metrics.read_bytes() if metrics.exists() else b"").count(b"\n") < round:
                time.sleep(0.02)
            time.sleep(0.1)
            process.kill()
    with start() as process:
        assert process.wait() == 0
    assert call("run", config, "--out", tmp_path / "whole").exit_code == 0
    assert adapter(folder) == adapter(tmp_path / "whole")
