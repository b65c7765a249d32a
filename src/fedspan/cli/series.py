"""The live view of a series of runs: a line for every run, and in a terminal a footer with the current one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from fedspan.assembly.run import Prepared
from fedspan.experiments.series import Step
from fedspan.experiments.series_bar import SeriesBar
from fedspan.progress.formatting import format_duration, format_runs, format_score, shorten

_LEFT = 58  # columns of a line up to the score


class SeriesView(SeriesBar):
    """Shows a series while it is entered as a context manager: a line for every run, and in a terminal the bars.

    Args:
        out: The console; if it is not a terminal, only the lines are printed.
    """

    def __init__(self, out: Console, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(out, clock)
        self._live.transient = True
        self._folder = folder
        self._printed_notes: set[str] = set()

    def on_series_start(self, steps: Sequence[Step]) -> None:
        super().on_series_start(steps)
        self._print(Text(f"{format_runs(self.runs)} in {self._folder}", "dim"))

    def on_run_finish(self, step: Step, metric: str, value: float | None, seconds: float, is_new: bool) -> None:
        super().on_run_finish(step, metric, value, seconds, is_new)
        self._format_line(
            step, f"{format_score(metric, value):>8} {format_duration(seconds):>8}", "" if is_new else "dim"
        )

    def on_run_failure(self, step: Step, reason: str) -> None:
        super().on_run_failure(step, reason)
        self._format_line(step, "  failed", "yellow")
        self._note(reason)

    def on_environment_change(self, changes: Mapping[str, tuple[object, object]]) -> None:
        text = ", ".join(f"{name} was {before} and is {after}" for name, (before, after) in changes.items())
        self._note(f"{text}; the last bits of the result may differ")

    def on_start(self, prepared: Prepared, done: int, resumed: bool) -> None:
        super().on_start(prepared, done, resumed)
        for note in prepared.notes:
            self._note(note)

    def _format_line(self, step: Step, result: str, style: str) -> None:
        left = f"{self.done:>{len(str(self.runs))}}/{self.runs}  {step.label}"
        self._print(Text(f"{shorten(left, _LEFT):<{_LEFT}} {result}", style))

    def _note(self, text: str) -> None:
        """Print a note on the data or the machine, once for all runs."""
        if text not in self._printed_notes:
            self._printed_notes.add(text)
            self._print(Text(f"note: {text}", "yellow"))
