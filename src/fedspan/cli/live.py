"""The view of a run at work: a line for every round, and in a terminal a footer with what happens now."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from fedspan.cli.text import duration, one_line, percent, size, titles
from fedspan.runs.build import Prepared
from fedspan.runs.folder import RunFolder
from fedspan.runs.ledger import read_lines
from fedspan.runs.listener import Listener

__all__ = ["RunView"]


class RunView(Listener):
    """Shows a run while it is entered as a context manager.

    Args:
        out: where to; without a terminal only the lines are printed.
        folder: of the run.
        clock: seconds.
    """

    def __init__(self, out: Console, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.done = self.rounds = 0
        self._out, self._folder, self._clock = out, folder, clock
        self._began = clock()
        self._prepared: Prepared | None = None
        self._losses: dict[str, float] = {}
        self._last = ""
        self._best = -1.0
        self._now = "reading the data and loading the model"
        self._baseline: tuple[str, int, int, float] | None = None
        self._work = _Work(clock)
        self._live = Live(get_renderable=self.footer, console=out, refresh_per_second=4, transient=True)

    def __enter__(self) -> RunView:
        if self._out.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def started(self, prepared: Prepared, done: int, resumed: bool) -> None:
        config, federation = prepared.config, prepared.federation
        self._prepared, self.done, self.rounds = prepared, done, federation.settings.rounds
        clients = len(federation.members)
        cohort = federation.settings.cohort or clients
        self._work.begin((self.rounds - done) * min(1.0, cohort / clients) + self.rounds * len(config.baselines))
        self._now = "training"
        examples = sum(len(member.train) for member in federation.members.values())
        each = f", {cohort} a round" if cohort < clients else ""
        self._print(
            Text.assemble(
                (config.method.name, "bold"),
                f" on {config.model.name.removeprefix('builtin:')} ({prepared.engine.adapted.device.type}): "
                f"{clients} clients{each}, {examples} training examples, {len(prepared.labels)} labels",
            )
        )
        self._print(Text(f"run folder {self._folder}", "dim"))
        self._print(self._line(("round", "loss", "validation", "test", "worst client", "down", "up", "time"), "dim"))
        if resumed:
            for row in read_lines(RunFolder(self._folder).metrics):
                self._print(self._row(row, "dim"))
            self._print(Text(f"going on after round {done} of {self.rounds}", "dim"))

    def client_finished(self, round: int, client: str, loss: float) -> None:
        assert self._prepared is not None
        cohort = self._prepared.federation.cohort(round - 1)
        if client not in self._losses:  # a method with two phases trains each client twice
            self._work.advance(1 / len(self._prepared.federation.members))
        self._losses[client], self._last = loss, client
        self._now = "measuring" if len(self._losses) >= len(cohort) else "training"

    def round_finished(self, row: Mapping[str, Any]) -> None:
        self.done = row["round"]
        self._losses.clear()
        self._now = "training" if self.done < self.rounds else "measuring the best round and exporting its adapter"
        self._print(self._row(row))

    def baseline_started(self, name: str, rounds: int) -> None:
        self._finish_baseline()
        self._baseline = (name, 0, rounds, float("nan"))
        self._now = "comparing"

    def baseline_round(self, name: str, round: int, loss: float) -> None:
        assert self._baseline is not None
        self._baseline = (name, round, self._baseline[2], loss)
        self._work.advance(1)
        if round == self._baseline[2]:
            self._finish_baseline()

    def _finish_baseline(self) -> None:
        if self._baseline is not None:
            name, round, _, loss = self._baseline
            self._print(Text(f"for comparison, {titles(name)}: {round} epochs, loss {loss:.4f}", "dim"))
            self._baseline = None

    def _print(self, text: Text) -> None:
        self._out.print(text, soft_wrap=True)

    def _line(self, cells: tuple[str, ...], style: str = "") -> Text:
        """Eight cells under each other, right-aligned, in 80 columns or up to 92."""
        number = max(6, 2 * len(str(self.rounds)) + 2)
        widths = [number, 9, 12, 8, 0, 10, 10, 9]
        widths[4] = max(12, min(self._out.width, 92) - sum(widths))
        shown = "".join(one_line(cell, width - 1).rjust(width) for cell, width in zip(cells, widths, strict=True))
        return Text(shown.rstrip(), style)

    def _row(self, row: Mapping[str, Any], style: str = "") -> Text:
        validation = _accuracy(row.get("validation"))
        worst = (row.get("clients") or {}).get("worst")
        if validation is not None and validation > self._best:
            self._best = validation
            style = f"bold {style}"
        moved = row["bytes"]
        cells = (
            f"{row['round']}/{self.rounds}",
            "-" if row["loss"] is None else f"{row['loss']:.4f}",
            percent(validation),
            percent(_accuracy(row.get("test"))),
            "-" if worst is None else f"{one_line(worst['client'], 12)} {percent(worst['accuracy'])}",
            size(moved["down"]),
            size(moved["up"]),
            duration(row["seconds"]),
        )
        return self._line(cells, style)

    def footer(self) -> RenderableType:
        """What happens now: bars, losses so far, elapsed time and time left."""
        elapsed = duration(self._clock() - self._began)
        left = self._work.left()
        times = f"elapsed {elapsed}" + ("" if left is None else f", about {duration(left)} left")
        if self._prepared is None:
            return Spinner("dots", Text(f"{self._now}, {times}", "dim"))
        bars = Table.grid(padding=(0, 1))
        bars.add_column(no_wrap=True)
        bars.add_column(no_wrap=True, justify="right")
        bars.add_column(width=30)
        bars.add_column(no_wrap=True, overflow="ellipsis")
        if self._baseline is not None:
            name, round, rounds, loss = self._baseline
            said = "" if round == 0 else f"loss {loss:.4f}"
            bars.add_row(titles(name), f"{round}/{rounds}", ProgressBar(rounds, round), Text(said))
        elif self.done < self.rounds:
            cohort = len(self._prepared.federation.cohort(self.done))
            clients, loss = len(self._losses), ""
            if self._losses:
                loss = f"loss {sum(self._losses.values()) / clients:.4f}  {one_line(self._last, 20)}"
            bars.add_row("round", f"{self.done + 1}/{self.rounds}", ProgressBar(self.rounds, self.done), "")
            bars.add_row("clients", f"{clients}/{cohort}", ProgressBar(cohort, clients), Text(loss))
        return Group("", bars, Spinner("dots", Text(f"{self._now}, {times}", "dim")))


class _Work:
    """How much is done, in passes over everybody's examples, and how long the rest may take."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._total = self._done = self._at = self._began = 0.0

    def begin(self, total: float) -> None:
        self._total, self._began = total, self._clock()

    def advance(self, work: float) -> None:
        self._done += work
        self._at = self._clock()

    def left(self) -> float | None:
        """Seconds, at the mean speed so far; None before there is one."""
        if self._done == 0:
            return None
        rest = (self._total - self._done) * (self._at - self._began) / self._done
        return max(0.0, rest - (self._clock() - self._at))


def _accuracy(scores: Mapping[str, float] | None) -> float | None:
    return None if scores is None else scores.get("accuracy")
