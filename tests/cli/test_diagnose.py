"""``fedspan diagnose``: its options, and a diagnosis as people read it and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedspan
from fedspan.diagnostics.round_diagnosis import STEPS, Barrier, Diagnosis

LOSSES = tuple(1.0 + 0.5 * (0 < position < 1) for position in STEPS)
FOUND = Diagnosis("fedit", 3, ("east", "west"), {}, math.nan, (Barrier(("east", "west"), LOSSES),), 7, 1.25)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the command asks for."""
    calls: list[tuple[Any, ...]] = []

    def diagnose(run: Path, round: Any, *, pairs: int, examples: int) -> Diagnosis:
        calls.append((run, round, pairs, examples))
        return FOUND

    monkeypatch.setattr(fedspan, "diagnose", diagnose)
    return calls


def test_options_are_passed_on(call: Callable[..., Any], asked: list[tuple[Any, ...]]) -> None:
    assert call("diagnose", "runs/first").exit_code == 0
    assert call("diagnose", "runs/first", "--round", "best", "--pairs", 6, "--examples", 9).exit_code == 0
    assert call("diagnose", "runs/first", "--round", "12").exit_code == 0
    run = Path("runs/first")
    assert asked == [(run, "last", 3, 500), (run, "best", 6, 9), (run, 12, 3, 500)]


def test_a_round_is_a_word_or_a_number(refused: Callable[..., str], asked: list[tuple[Any, ...]]) -> None:
    said = refused("diagnose", "runs/first", "--round", "first")
    assert said == "`--round`: 'first' is not accepted. Expected best, last, or a number."
    assert asked == []


def test_as_people_read_it(call: Callable[..., Any], asked: list[tuple[Any, ...]]) -> None:
    shown = " ".join(call("diagnose", "runs/first").output.split())
    assert "fedit, round 3: 2 clients, 0 target layers" in shown
    assert "east - west 1.0000 1.5000 1.0000 0.5000" in shown
    assert "The diagnostics took 1.2 s, in addition to the round." in shown


def test_as_json(call: Callable[..., Any], asked: list[tuple[Any, ...]]) -> None:
    content = json.loads(call("diagnose", "runs/first", "--json").stdout)
    assert content["barriers"] == [
        {"clients": ["east", "west"], "at": list(STEPS), "losses": list(LOSSES), "height": 0.5}
    ]
    assert (content["method"], content["round"], content["clients"]) == ("fedit", 3, ["east", "west"])
    assert (content["layers"], content["examples"], content["seconds"]) == ({}, 7, 1.25)
