"""What a user can get wrong on the command line is answered with exit code 2; helpers.mistakes has the errors."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Refused = Callable[..., str]
Write = Callable[..., Path]


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


def test_run_without_and_with_too_much(refused: Refused, stopped: Path, write: Write) -> None:
    assert refused("run").startswith("`CONFIG`: no value is given. Expected a YAML file, or --resume FOLDER")
    config = write()
    assert refused("run", config, "--resume", stopped).startswith("`CONFIG`: it cannot be combined with --resume")
    assert refused("run", "--out", "x", "--resume", stopped).startswith("`--out`: it cannot be combined")
    assert refused("run", "--set", "seed=1", "--resume", stopped).startswith("`seed`: the config with which this run")


def test_unknown_clients(refused: Refused, finished: Path, personal: Path, tmp_path: Path) -> None:
    assert "Did you mean 'west'" in refused("predict", finished, "word1", "--client", "weast")
    assert "has no client 'weast'" in refused("evaluate", personal, "--client", "weast")
    assert "has no client 'weast'" in refused("export", personal, "--client", "weast", "--out", tmp_path / "out")


def test_an_exported_adapter_is_alone(
    refused: Refused, call: Callable[..., Any], finished: Path, tmp_path: Path
) -> None:
    assert call("export", finished, "--out", tmp_path / "adapter").exit_code == 0
    assert refused("evaluate", tmp_path / "adapter").startswith("`data`: no data are given")
    assert refused("predict", tmp_path / "adapter", "word1", "--client", "east").startswith("`client`: this model is ")
