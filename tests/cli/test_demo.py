"""``fedspan demo``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

import fedspan
from helpers.command_line import done

Call = Callable[..., Result]


@pytest.mark.slow  # a step of its own in .ci/run, too
def test_demo(call: Call, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    changes = [
        f"model.name={tiny_folder / 'bert'}",
        "model.layers_to_transform=null",
        "method.r=2",
        "data.max_examples=40",
        "partition.clients=2",
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
    assert config.data.train == "builtin:banking-queries"
    assert (config.method.name, config.baselines) == ("fedit", ["local", "centralized"])
