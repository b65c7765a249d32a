"""``fedspan run``: its rounds, its end, and resuming."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import yaml
from click.testing import Result

from helpers import tiny_decoders
from helpers.command_line import done

Call = Callable[..., Result]


def test_run_shows_every_round_and_closes_with_the_comparison(finished: Path) -> None:
    screen = (finished.parent / "screen.txt").read_text()
    report = json.loads((finished / "report.json").read_text())
    for round in (1, 2):
        assert f" {round}/2 " in screen
    for shown in ("fedit", "local only", "centralized", "held-out", "client tests", "worst client"):
        assert shown in screen
    assert f"{100 * report['scores']['test']['accuracy']:.1f}%" in screen
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
    """A line each, and the snippet loads a causal language model."""
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
