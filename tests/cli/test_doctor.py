"""``fedspan doctor``: what it says of packages, the disk and the port is so."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

Call = Callable[..., Any]


def test_a_line_for_everything_and_an_end_with_0(call: Call, tmp_path: Path) -> None:
    result = call("doctor", "--folder", tmp_path / "not" / "there")
    assert result.exit_code == 0, result.output
    shown = " ".join(result.output.split())
    for what in (
        "fedspan",
        "extra flower",
        "extra privacy",
        "accelerator",
        "memory",
        "disk",
        "port",
        "demo model",
        "hub",
    ):
        assert what in shown
    assert f"torch {version('torch')}" in shown
    found = json.loads(call("doctor", "--json").stdout)
    assert {one["state"] for one in found} <= {"ok", "note"}
    assert "extra dev" not in {one["name"] for one in found}
