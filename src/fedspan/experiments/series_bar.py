"""The progress bars of a series of runs: of a call in Python, and the footer of the command line's view."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.text import Text

from fedspan.experiments.series import Step, Watcher, Watchers
from fedspan.progress.bar import LiveBar, ProgressBar, has_bar
from fedspan.progress.formatting import format_duration, format_runs, shorten
from fedspan.progress.listener import Listeners
from fedspan.training.stages import Stage


class SeriesBar(LiveBar, Listeners, Watcher):
    """Shows the current run of a series and its bars, its only listener, while it is entered as a context manager.

    Args:
        console: The console; None: standard error, in a notebook below the cell.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.done = self.runs = 0
        self._step: Step | None = None
        super().__init__(console, clock)  # after the step, because it renders the footer
        self._create_bar()

    def _create_bar(self) -> None:
        self._run = ProgressBar(Console(quiet=True, force_interactive=self.is_live), self._clock)
        self.listeners = (self._run,)

    def on_series_start(self, steps: Sequence[Step]) -> None:
        self.done, self.runs = 0, len(steps)

    def on_run_start(self, step: Step) -> None:
        self._step = step
        self._create_bar()

    def on_run_finish(self, step: Step, metric: str, value: float | None, seconds: float, is_new: bool) -> None:
        self.done += 1

    def on_run_failure(self, step: Step, reason: str) -> None:
        self.done += 1

    def on_stage_change(self, stage: Stage | None) -> None:
        super().on_stage_change(stage)
        if stage is not None and self._step is not None:
            self._report(self._describe_run)

    def _describe_run(self) -> str:
        assert self._step is not None
        return shorten(f"{self._step.label}: {self._run.describe_state()}", self._out.width - 2)

    def render_footer(self) -> RenderableType:
        """Render the current run, its bars, and the time of the whole series."""
        elapsed = format_duration(self._clock() - self._began)
        if self._ended:
            return Text(f"{format_runs(self.done)} in {elapsed}")
        if self._step is None:
            return Text("")
        now = f"run {min(self.done + 1, self.runs)} of {self.runs}: {self._step.label}; all: {elapsed}"
        return Group("", Text(shorten(now, self._out.width)), self._run.render_footer())


@contextmanager
def open_watcher(listener: Watcher | None, progress: bool | None) -> Generator[Watcher]:
    """Yield a watcher that forwards all events to the caller's watcher, and to progress bars if they are requested.

    Args:
        progress: Whether to show bars; None: if standard error is a terminal, or in a notebook.
    """
    if not has_bar(progress):
        yield listener or Watcher()
        return
    with SeriesBar() as bar:
        yield Watchers(listener or Watcher(), bar)
