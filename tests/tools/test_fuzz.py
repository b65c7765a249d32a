"""Mutated messages, requests and configs end in their documented errors; a finding is reported and can be repeated."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.scripts import load_script

pytest.importorskip("Crypto", reason="the extra fedspan[secagg] is not installed")

from fedspan.transports.http import app
from helpers import fuzz_targets

SCRIPT = Path(__file__).parents[1] / "fuzz.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("tests/fuzz.py")


@pytest.mark.parametrize("name", sorted(fuzz_targets.TARGETS))
def test_a_few_inputs_of_every_target(script: ModuleType, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.fuzz(name, 1, range(60)) == (60, 0), capsys.readouterr().out


def test_mutations_keep_some_inputs_valid_and_break_most() -> None:
    for name, make in fuzz_targets.TARGETS.items():
        target: Any = make()
        taken = 0
        for number in range(60):
            try:
                target.inner.read(target.input(0, number))
            except target.error:
                continue
            taken += 1
        assert 1 <= taken < 30, (name, taken)


@pytest.mark.parametrize("name", sorted(fuzz_targets.TARGETS))
def test_unchanged_inputs_are_valid(name: str) -> None:
    """So that mutated ones reach what lies behind the first check."""
    target: Any = fuzz_targets.TARGETS[name]()
    for seed in target.seeds:
        target.inner.read(seed)


def test_every_request_of_a_node_is_a_seed() -> None:
    """As the table of the handlers names them."""
    seeds = b"".join(fuzz_targets.TARGETS["requests"]().seeds)
    rows = re.findall(r"^\| ``(.*?)``.*\| (?:anyone|a key, in headers|a session) \|", app.__doc__ or "", re.MULTILINE)
    assert len(rows) >= 9
    for row in rows:
        assert re.search(re.sub(r"ID|OFFER|FILE", "[0-9a-f]+", row).encode(), seeds), row


def test_the_script_names_every_target(script: ModuleType) -> None:
    assert tuple(fuzz_targets.TARGETS) == script.NAMES


def test_an_input_is_the_same_every_time() -> None:
    for make in fuzz_targets.TARGETS.values():
        one, other, numbers = make(), make(), range(20)
        assert [one.input(0, number) for number in numbers] == [other.input(0, number) for number in numbers]
        assert other.input(0, 3) == one.input(0, 3)  # after others


def test_a_finding_is_named_and_ends_the_target_after_a_few(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(fuzz_targets.Codec):
        def read(self, data: bytes) -> None:
            if data not in self.seeds:
                raise KeyError("undocumented")

    monkeypatch.setitem(fuzz_targets.TARGETS, "codec", lambda: fuzz_targets.Refusing(Broken(), ValueError))
    assert script.fuzz("codec", 0, range(100)) == (5, 5)
    said = capsys.readouterr().out
    assert "FINDING: --target codec --seed 0 --number 0" in said
    assert "KeyError: 'undocumented'" in said


def test_coverage_guides_the_mutations() -> None:
    pytest.importorskip("atheris", reason="the extra fedspan[fuzz] is not installed")
    command = [sys.executable, str(SCRIPT), "--target", "codec", "--coverage", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
