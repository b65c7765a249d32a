"""What a run shows while it is at work."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedspan.cli.formatting import duration, number, one_line, percent
from fedspan.cli.live import RunView
from fedspan.cli.remaining_time import Effort
from fedspan.experiments.tables import size
from fedspan.runs.setup import Prepared


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def row(round: int, accuracy: float, **more: Any) -> dict[str, Any]:
    moved = {"down": 1_700_000 * round, "up": 1_600_000 * round}
    scores = {
        "validation": {"accuracy": accuracy},
        "test": {"accuracy": accuracy - 0.01},
        "clients": {"accuracy": 0.5, "worst": {"client": "a-hospital-with-a-long-name", "accuracy": 0.25}},
    }
    return {"round": round, "loss": 1.25, "seconds": 61.0 * round, "bytes": moved, **scores, **more}


@pytest.fixture
def clock() -> Clock:
    return Clock()


def view(width: int, clock: Clock, *, terminal: bool) -> tuple[RunView, Console]:
    out = Console(file=io.StringIO(), width=width, force_terminal=terminal, highlight=False, legacy_windows=False)
    return RunView(out, Path("runs/first"), clock), out


def printed(out: Console) -> list[str]:
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue().splitlines()


def footer(shown: RunView, width: int) -> str:
    out = Console(file=io.StringIO(), width=width)
    out.print(shown.footer())
    return "\n".join(printed(out))


def test_lines_without_a_terminal(prepared: Prepared, clock: Clock) -> None:
    shown, out = view(80, clock, terminal=False)
    with shown:
        shown.started(prepared, 0, False)
        for client in ("east", "north", "south"):
            shown.client_finished(1, client, 1.0)
        shown.round_finished(row(1, 0.5))
        shown.round_finished(row(2, 0.625, loss=None, test=None, clients=None))
        shown.round_finished({**row(3, 0.0), "validation": None})
        shown.baseline_started("local", 3)
        for round in (1, 2, 3):
            shown.baseline_round("local", round, 0.5)
    head, folder, columns, *lines = printed(out)
    assert head.startswith("fedit on ")
    assert "4 clients, 3 a round" in head
    assert folder == "run folder runs/first"
    assert columns.split()[:3] == ["round", "loss", "validation"]
    assert lines[0].split() == [
        "1/3",
        "1.2500",
        "50.0%",
        "49.0%",
        "a-hospital-wi…",
        "25.0%",
        *["1.7", "MB", "1.6", "MB", "1:01"],
    ]
    assert lines[1].split() == ["2/3", "-", "62.5%", "-", "-", "3.4", "MB", "3.2", "MB", "2:02"]
    assert lines[2].split()[2] == "-"
    assert lines[3:] == ["for comparison, local only: 3 epochs, loss 0.5000"]
    assert {len(line) for line in lines[:3]} == {80}


@pytest.mark.parametrize("width", [80, 120])
def test_footer(prepared: Prepared, clock: Clock, width: int) -> None:
    shown, _ = view(width, clock, terminal=True)
    assert "reading the data and loading the model, elapsed 0:00" in footer(shown, width)
    clock.now = 10.0
    shown.started(prepared, 0, False)
    said = footer(shown, width)
    assert "1/3" in said
    assert "0/3" in said
    assert "left" not in said, "no speed yet"
    clock.now = 20.0
    first = prepared.federation.cohort(0)[0]
    shown.client_finished(1, first, 2.0)
    shown.client_finished(1, first, 1.0)  # a second phase of the same client
    said = footer(shown, width)
    assert "loss 1.0000" in said
    assert first in said
    assert "elapsed 0:20, about" in said
    for client in prepared.federation.cohort(0)[1:]:
        shown.client_finished(1, client, 1.0)
    assert "measuring, " in footer(shown, width)
    for round in (1, 2, 3):
        shown.round_finished(row(round, 0.5))
    assert "measuring the best round" in footer(shown, width)
    shown.baseline_started("centralised", 3)
    shown.baseline_round("centralised", 1, 0.75)
    said = footer(shown, width)
    assert "centralised" in said
    assert "1/3" in said
    assert "loss 0.7500" in said
    assert max(map(len, said.splitlines())) <= width


def test_time_left_reaches_nothing_at_the_end(prepared: Prepared, clock: Clock) -> None:
    """With speeds as assumed, the run ends when the first estimate said."""
    changed = replace(prepared, config=prepared.config.model_copy(update={"baselines": ["local", "centralised"]}))
    events: list[Callable[[RunView], None]] = []
    for round in (1, 2, 3):
        for client in prepared.federation.cohort(round - 1):
            events.append(partial(RunView.client_finished, round=round, client=client, loss=1.0))
        events.append(partial(RunView.round_finished, row=row(round, 0.5)))
    for name in ("local", "centralised"):
        events.append(partial(RunView.baseline_started, name=name, rounds=3))
        events += [partial(RunView.baseline_round, name=name, round=round, loss=1.0) for round in (1, 2, 3)]

    def started() -> tuple[RunView, Effort]:
        shown, _ = view(80, clock, terminal=True)
        shown.started(changed, 0, False)
        assert shown._effort is not None
        return shown, shown._effort

    shown, effort = started()
    completed: list[float] = []
    for event in events:
        event(shown)
        completed.append(effort.task.completed)
    effort.scored("centralised")
    total = effort.task.total
    assert total is not None
    assert effort.task.completed == pytest.approx(total)
    assert effort.left() is None

    shown, effort = started()
    for event, passes in zip(events, completed, strict=True):
        clock.now = passes  # a pass takes a second
        event(shown)
        left = effort.left()
        assert left is not None
        assert total <= clock.now + left < total + 1
        clock.now += 0.5
        assert effort.left() == pytest.approx(left - 0.5), "it counts down between two counts"


def test_fifty_clients_are_as_calm_as_four(prepared: Prepared, clock: Clock) -> None:
    shown, out = view(80, clock, terminal=True)
    shown.started(prepared, 0, False)
    lines = len(printed(out))
    for index in range(50):
        shown._losses[f"client-{index:02}"] = 1.0
    assert len(printed(out)) == lines
    assert len(footer(shown, 80).splitlines()) == 4


def test_going_on_shows_the_rounds_before(prepared: Prepared, clock: Clock, stopped: Path) -> None:
    out = Console(file=io.StringIO(), width=80)
    shown = RunView(out, stopped, clock)
    shown.started(prepared, 2, True)
    lines = printed(out)
    assert lines[-1] == "going on after round 2 of 3"
    assert lines[-2].split()[0] == "2/3"


def test_numbers() -> None:
    assert [size(n) for n in (0, 999, 1000, 1_250_000, 99_940_000, 999_600_000, 3.2e12)] == [
        "0 B", "999 B", "1.0 kB", "1.2 MB", "99.9 MB", "1.0 GB", "3.2 TB",
    ]  # fmt: skip
    assert [duration(s) for s in (0.4, 59.6, 75, 3675)] == ["0:00", "1:00", "1:15", "1:01:15"]
    assert [percent(v) for v in (None, 0.0, 0.8125, 1.0)] == ["-", "0.0%", "81.2%", "100.0%"]
    assert [number(v) for v in (None, 0.5, 123456.0)] == ["-", "0.5000", "1.23e+05"]
    assert one_line(" two\n words ", 20) == "two words"
    assert one_line("a long text", 6) == "a lon…"
