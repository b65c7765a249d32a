"""``fedspan doctor``: what it says of packages, the disk and the port is so."""

import json
import socket
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from fedspan.cli import doctor

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


def test_a_package_that_is_missing_or_old(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(name: str) -> str:
        if name in ("opacus", "ray"):
            raise PackageNotFoundError
        return {"peft": "0.1.0"}.get(name) or version(name)

    monkeypatch.setattr(doctor, "version", other)
    result = call("doctor", "--json")
    found = {one["name"]: one for one in json.loads(result.stdout)}
    assert result.exit_code == 1
    assert found["fedspan"]["state"] == "missing"
    assert "peft is 0.1.0, not " in found["fedspan"]["finding"]
    assert found["fedspan"]["advice"] == "pip install fedspan"
    assert found["extra cluster"]["finding"] == "ray is not installed"
    assert found["extra privacy"] == {
        "name": "extra privacy",
        "state": "note",
        "finding": "opacus is not installed",
        "advice": "pip install 'fedspan[privacy]'",
    }


def test_a_port_that_is_taken_and_a_folder_that_is_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setattr(doctor, "_PORT", taken.getsockname()[1])
        check = {one.name: one for one in doctor.run_checks(tmp_path)}["port"]
    assert (check.state, "is taken" in check.finding) == ("note", True)
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    assert {one.name: one for one in doctor.run_checks(tmp_path)}["disk"].state == "missing"
