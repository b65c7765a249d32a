"""The live view of a series of runs: a line for every run, and in a terminal a footer with the current one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from fedspan.cli.formatting import duration, one_line, score
from fedspan.cli.live import RunView, silence
from fedspan.experiments.series import Step, Watcher
from fedspan.runs.setup import Prepared
from fedspan.training.stages import Stage

__all__ = ["SeriesView"]

_LEFT = 58  # columns of a line up to the score


class SeriesView(Watcher):
    """Shows a series while it is entered as a context manager.

    The footer is that of a single run, whose lines are not printed.

    Args:
        out: The console; if it is not a terminal, only the lines are printed.
        folder: The series' folder.
        clock: Function that returns the time in seconds.
    """

    def __init__(self, out: Console, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.done = self.runs = 0
        self._out, self._folder, self._clock = out, folder, clock
        self._began = self._printed = clock()
        self._step: Step | None = None
        self._run = RunView(Console(quiet=True), folder, clock)
        self._said: set[str] = set()
        self._live = Live(get_renderable=self.footer, console=out, refresh_per_second=4, transient=True)

    def __enter__(self) -> SeriesView:
        if self._out.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def series_started(self, steps: Sequence[Step]) -> None:
        self.done, self.runs = 0, len(steps)
        self._print(Text(f"{self.runs} runs in {self._folder}", "dim"))

    def run_started(self, step: Step) -> None:
        self._step = step
        self._run = RunView(Console(quiet=True), self._folder / step.name, self._clock)

    def run_finished(self, step: Step, metric: str, value: float | None, seconds: float, played: bool) -> None:
        self._line(step, f"{score(metric, value):>8} {duration(seconds):>8}", "" if played else "dim")

    def run_failed(self, step: Step, why: str) -> None:
        self._line(step, "  failed", "yellow")
        self._note(why)

    def environment_changed(self, changes: Mapping[str, tuple[object, object]]) -> None:
        shown = ", ".join(f"{name} was {then} and is {now}" for name, (then, now) in changes.items())
        self._note(f"{shown}; the last bits of the result may differ")

    def started(self, prepared: Prepared, done: int, resumed: bool) -> None:
        self._run.started(prepared, done, resumed)
        for remark in prepared.remarks:
            self._note(remark)

    def stage_changed(self, stage: Stage | None) -> None:
        self._run.stage_changed(stage)
        now = self._clock()
        if stage is None or self._step is None or self._out.is_terminal:
            return
        if now - self._printed >= silence(now - self._began):
            self._print(Text(one_line(f"  {self._step.label}: {self._run.state()}", self._out.width), "dim"))

    def client_finished(self, round: int, client: str, loss: float) -> None:
        self._run.client_finished(round, client, loss)

    def round_finished(self, row: Mapping[str, Any]) -> None:
        self._run.round_finished(row)

    def baseline_started(self, name: str, rounds: int) -> None:
        self._run.baseline_started(name, rounds)

    def baseline_round(self, name: str, round: int, loss: float) -> None:
        self._run.baseline_round(name, round, loss)

    def _line(self, step: Step, result: str, style: str) -> None:
        self.done += 1
        left = f"{self.done:>{len(str(self.runs))}}/{self.runs}  {step.label}"
        self._print(Text(f"{one_line(left, _LEFT):<{_LEFT}} {result}", style))

    def _note(self, text: str) -> None:
        """Print a remark on the data or the machine, once for all runs."""
        if text not in self._said:
            self._said.add(text)
            self._print(Text(f"note: {text}", "yellow"))

    def _print(self, text: Text) -> None:
        self._printed = self._clock()
        self._out.print(text, soft_wrap=True)

    def footer(self) -> RenderableType:
        """Render the current run, its bars, and the time of the whole series."""
        if self._step is None:
            return Text("")
        elapsed = duration(self._clock() - self._began)
        now = f"run {min(self.done + 1, self.runs)} of {self.runs}: {self._step.label}; all: {elapsed}"
        return Group("", Text(one_line(now, self._out.width)), self._run.footer())
