"""The live view of a run: a line for every round, and in a terminal a footer with the current progress."""

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

from fedspan.cli.formatting import duration, number, one_line, score, titles
from fedspan.cli.remaining_time import Effort
from fedspan.experiments.tables import size
from fedspan.logs import read_lines
from fedspan.runs.callbacks import Listener, rate_round
from fedspan.runs.checkpoint import Best
from fedspan.runs.folder import RunFolder
from fedspan.runs.setup import Prepared
from fedspan.tasks.metrics import METRICS

__all__ = ["RunView"]

_WORST = 4  # the cell with the worst client


class RunView(Listener):
    """Shows a run while it is entered as a context manager.

    Args:
        out: The console; if it is not a terminal, only the lines are printed.
        folder: The run's folder.
        clock: Function that returns the time in seconds.
    """

    def __init__(self, out: Console, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.done = self.rounds = 0
        self._out, self._folder, self._clock = out, folder, clock
        self._began = clock()
        self._prepared: Prepared | None = None
        self._losses: dict[str, float] = {}
        self._last = ""
        self._best: Best | None = None
        self._now = "reading the data and loading the model"
        self._baseline: tuple[str, int, int, float] | None = None
        self._effort: Effort | None = None
        self._live = Live(get_renderable=self.footer, console=out, refresh_per_second=4, transient=True)

    def __enter__(self) -> RunView:
        if self._out.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def environment_changed(self, changes: Mapping[str, tuple[object, object]]) -> None:
        shown = ", ".join(f"{name} was {then} and is {now}" for name, (then, now) in changes.items())
        self._print(Text(f"note: {shown}; the last bits of the result may differ", "yellow"))

    def noted(self, text: str) -> None:
        self._print(Text(f"note: {text}", "yellow"))

    def started(self, prepared: Prepared, done: int, resumed: bool) -> None:
        config, federation = prepared.config, prepared.federation
        self._prepared, self.done, self.rounds = prepared, done, federation.settings.rounds
        clients = len(federation.clients)
        cohort = federation.settings.cohort or clients
        self._effort = Effort(prepared, done, self._clock)
        self._now = "training" if done < self.rounds else "measuring the best round"
        parts, members = prepared.partition, federation.clients
        known = sum(member.client.examples for member in members.values()) if parts is None else 0
        examples = known if parts is None else int(parts.parts.sizes[:, 0].sum())
        each = f", {cohort} a round" if cohort < clients else ""
        self._print(
            Text.assemble(
                (config.method.title, "bold"),
                f" on {config.model.name.removeprefix('builtin:')} ({prepared.engine.adapted.device.type}): "
                f"{clients} clients{each}, {examples} training examples"
                + (f", {len(prepared.labels)} labels" if prepared.labels else "")
                + f"; measured by {METRICS[prepared.task.metric].title}",
            )
        )
        self._print(Text(f"run folder {self._folder}", "dim"))
        for remark in prepared.remarks:
            self._print(Text(f"note: {remark}", "yellow"))
        self._print(self._line(("round", "loss", "validation", "test", "worst client", "down", "up", "time"), "dim"))
        if resumed:
            for row in read_lines(RunFolder(self._folder).metrics):
                self._print(self._row(row, "dim"))
            self._print(Text(f"going on after round {done} of {self.rounds}", "dim"))

    def client_finished(self, round: int, client: str, loss: float) -> None:
        assert self._prepared is not None
        assert self._effort is not None
        if client not in self._losses:  # a method with two phases trains each client twice
            self._effort.client(client)
        self._losses[client], self._last = loss, client
        trained = len(self._losses) >= len(self._prepared.federation.cohort(round - 1))
        self._now = "measuring" if trained else "training"

    def round_finished(self, row: Mapping[str, Any]) -> None:
        assert self._effort is not None
        self.done = row["round"]
        if self.done:
            self._effort.round(self.done)
        self._losses.clear()
        self._now = "training" if self.done < self.rounds else "measuring the best round"
        self._print(self._row(row))
        for failure in row.get("failures") or ():
            self._print(Text(f"  {failure['client']}: {failure['reason']}", "yellow"))
        if late := row.get("late"):
            self._print(Text(f"  late, and not waited for: {', '.join(late)}", "dim"))

    def baseline_started(self, name: str, rounds: int) -> None:
        assert self._effort is not None
        if self._baseline is None:
            self._effort.closed()
        else:
            self._effort.scored(self._baseline[0])
        self._baseline = (name, 0, rounds, 0.0)
        self._now = f"for comparison: {titles(name)}"

    def baseline_round(self, name: str, round: int, loss: float) -> None:
        assert self._baseline is not None
        assert self._effort is not None
        self._effort.epoch()
        self._baseline = (name, round, self._baseline[2], loss)
        if round == self._baseline[2]:
            self._print(Text(f"for comparison, {titles(name)}: {round} epochs, loss {number(loss)}", "dim"))
            self._now = f"measuring {titles(name)}"

    def _print(self, text: Text) -> None:
        self._out.print(text, soft_wrap=True)

    def _widths(self) -> list[int]:
        """Compute the widths of eight cells, in 80 to 92 columns."""
        widths = [max(6, 2 * len(str(self.rounds)) + 2), 8, 11, 7, 0, 9, 9, 8]
        widths[_WORST] = max(12, min(self._out.width, 92) - sum(widths))
        return widths

    def _line(self, cells: tuple[str, ...], style: str = "") -> Text:
        """Format a line of right-aligned cells."""
        widths = self._widths()
        shown = "".join(one_line(cell, width - 1).rjust(width) for cell, width in zip(cells, widths, strict=True))
        return Text(shown, style)

    def _row(self, row: Mapping[str, Any], style: str = "") -> Text:
        assert self._prepared is not None
        metric = self._prepared.task.metric
        validation, test = row.get("validation") or {}, row.get("test") or {}
        worst = (row.get("clients") or {}).get("worst")
        deciding = self._prepared.config.evaluation.deciding(metric)
        rated = rate_round(deciding, row["round"], validation or None)
        if validation and (self._best is None or rated > self._best):
            self._best = rated
            style = f"bold {style}"
        moved, named = row["bytes"], self._widths()[_WORST] - 8
        cells = (
            f"{row['round']}/{self.rounds}" if row["round"] else "start",
            number(row["loss"]) if "loss" in row else "-",
            score(metric, validation.get(metric)),
            score(metric, test.get(metric)),
            "-" if worst is None else f"{one_line(worst['client'], named)} {score(metric, worst[metric])}",
            size(moved["down"]),
            size(moved["up"]),
            duration(row["seconds"]),
        )
        return self._line(cells, style)

    def footer(self) -> RenderableType:
        """Render the current progress: bars, losses so far, elapsed time and time left."""
        elapsed = duration(self._clock() - self._began)
        left = None if self._effort is None else self._effort.left()
        times = f"elapsed {elapsed}" + ("" if left is None else f", about {duration(left)} left")
        state = Spinner("dots", Text(f"{self._now}, {times}", "dim"))
        return state if self._prepared is None else Group("", *self._bars(self._prepared), state)

    def _bars(self, prepared: Prepared) -> list[Table]:
        bars = Table.grid(padding=(0, 1))
        bars.add_column(no_wrap=True)
        bars.add_column(no_wrap=True, justify="right")
        bars.add_column(width=30)
        bars.add_column(no_wrap=True, overflow="ellipsis")
        if self._baseline is not None:
            name, round, rounds, loss = self._baseline
            said = f"loss {number(loss)}" if round else ""
            bars.add_row(titles(name), f"{round}/{rounds}", ProgressBar(rounds, round), said)
        elif self.done < self.rounds:
            cohort, trained = len(prepared.federation.cohort(self.done)), len(self._losses)
            said = ""
            if trained:
                said = f"loss {number(sum(self._losses.values()) / trained)}  {one_line(self._last, 20)}"
            bars.add_row("round", f"{self.done + 1}/{self.rounds}", ProgressBar(self.rounds, self.done), "")
            bars.add_row("clients", f"{trained}/{cohort}", ProgressBar(cohort, trained), Text(said))
        return [bars] if bars.row_count else []
