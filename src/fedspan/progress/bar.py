"""The progress of a run: bars in a terminal or a notebook, and lines elsewhere; of calls and of the command line."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar as Bar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from fedspan.assembly.run import Prepared
from fedspan.progress.formatting import format_duration, format_number, shorten
from fedspan.progress.listener import Listener
from fedspan.progress.remaining_time import Effort, describe_stage
from fedspan.training.stages import Stage

_QUIET = 10.0
_SIMILAR = 1.2  # ratio up to which two estimates are one
_RARER = 20  # progress lines become less frequent: one per this fraction of the elapsed time


def has_bar(progress: bool | None) -> bool:
    """Return whether a call shows a bar; None: if standard error is a terminal, or in a notebook."""
    if progress is not None:
        return progress
    return sys.stderr.isatty() or Console(stderr=True).is_jupyter


class LiveBar(ABC):
    """A footer that is rendered several times per second while the object is entered as a context manager.

    Where no footer can be drawn, it prints lines: into files, and in notebooks without ipywidgets.

    Args:
        console: The console; None: standard error, in a notebook below the cell.

    Attributes:
        is_live: Whether the footer is drawn.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        if console is None:  # FORCE_COLOR does not make a file a terminal
            console = Console(stderr=True, highlight=False, force_interactive=None if sys.stderr.isatty() else False)
        self._out = console
        self._clock, self._began = clock, clock()
        self._printed, self._lines = self._began, 0  # when the last line was printed, and how many there were
        self._ended = False
        self.is_live = self._out.is_interactive or (self._out.is_jupyter and find_spec("ipywidgets") is not None)
        self._live = Live(
            get_renderable=self.render_footer,
            console=self._out,
            refresh_per_second=4,
            redirect_stdout=sys.stdout.isatty(),  # what a script prints into a file stays out of the bars
        )

    def __enter__(self) -> Self:
        if self.is_live:
            self._live.start()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._ended = error is None
        if self.is_live:
            self._live.stop()
        elif self._ended and not self._live.transient:
            self._out.print(self.render_footer())

    def _print(self, text: Text) -> None:
        self._printed, self._lines = self._clock(), self._lines + 1
        self._out.print(text, soft_wrap=True)

    def _report(self, describe: Callable[[], str]) -> None:
        """Print the state if there is no footer, and no line was printed for a while."""
        now = self._clock()
        if not self.is_live and now - self._printed >= max(_QUIET, (now - self._began) / _RARER):
            self._print(Text(f"  {describe()}", "dim"))

    @abstractmethod
    def render_footer(self) -> RenderableType:
        """Render the current progress."""


def _format_range(least: float, most: float) -> str:
    """Format two estimates of a time, as one if they are similar."""
    if most < _SIMILAR * least:
        return format_duration((least + most) / 2)
    return f"{format_duration(least)} to {format_duration(most)}"


class ProgressBar(LiveBar, Listener):
    """Shows the rounds, the current stage and the time left while it is entered as a context manager."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.done = self.rounds = 0
        self._prepared: Prepared | None = None
        self._effort: Effort | None = None
        self._stage: Stage | None = None
        self._losses: dict[str, float] = {}
        self._last = ""
        self._now = "reading the data and loading the model"
        self._baseline: tuple[str, int, int, float] | None = None
        super().__init__(console, clock)  # last, because it renders the footer

    def on_start(self, prepared: Prepared, done: int, resumed: bool) -> None:
        self._prepared, self.done, self.rounds = prepared, done, prepared.federation.settings.rounds
        self._effort = Effort(prepared, done, self._clock)
        self._now = "training" if done < self.rounds else "measuring the best round"

    def on_stage_change(self, stage: Stage | None) -> None:
        self._stage = stage
        if self._effort is not None:
            self._effort.stage(stage)
        if stage is not None and self._prepared is None and not self._lines and not self.is_live:
            self._print(Text(self._now, "dim"))
        elif stage is not None:
            self._report(self.describe_state)

    def on_client_finish(self, round: int, client: str, loss: float) -> None:
        self._losses[client], self._last = loss, client

    def on_round_finish(self, row: Mapping[str, Any]) -> None:
        assert self._effort is not None
        self.done = row["round"]
        self._effort.finish(f"round {self.done}", row.get("best_round"))
        self._losses.clear()
        self._now = "training" if self.done < self.rounds else "measuring the best round"

    def on_baseline_start(self, name: str, rounds: int) -> None:
        assert self._effort is not None
        self._effort.finish("closing" if self._baseline is None else self._baseline[0])
        self._baseline = (name, 0, rounds, 0.0)
        self._now = f"for comparison, {name}"

    def on_baseline_round(self, name: str, round: int, loss: float) -> None:
        assert self._baseline is not None
        assert self._effort is not None
        self._effort.finish(f"{name} {round}")
        self._baseline = (name, round, self._baseline[2], loss)

    def render_footer(self) -> RenderableType:
        """Render the current progress: bars, losses so far, elapsed time and time left."""
        if self._ended:
            return Text(f"{self.done} rounds in {format_duration(self._clock() - self._began)}")
        state = Spinner("dots", Text(self.describe_state(), "dim", no_wrap=True, overflow="ellipsis"))
        return state if self._prepared is None else Group("", *self._render_bars(self._prepared), state)

    def describe_state(self) -> str:
        """Describe the current stage, the elapsed time and the time left in one line."""
        stage, now = self._stage, self._now
        if stage is not None:
            now, bars = describe_stage(stage), self._prepared is not None and self.is_live
            if self._baseline is not None and not bars:
                now = f"for comparison, {self._baseline[0]}: {now}"
            if stage.total and stage.done < stage.total and not bars:
                now += f", {stage.done} of {stage.total} {stage.unit}"
        left = None if self._effort is None else self._effort.estimate_left()
        times = f"elapsed {format_duration(self._clock() - self._began)}"
        return f"{now}, {times}" + ("" if left is None else f", about {_format_range(*left)} left")

    def _render_bars(self, prepared: Prepared) -> list[Table]:
        bars = Table.grid(padding=(0, 1))
        bars.add_column(no_wrap=True, min_width=8)
        bars.add_column(no_wrap=True, min_width=9, justify="right")
        bars.add_column(width=30)
        bars.add_column(no_wrap=True, overflow="ellipsis")
        if self._baseline is not None:
            name, round, rounds, loss = self._baseline
            bars.add_row(name, f"{round}/{rounds}", Bar(rounds, round), f"loss {format_number(loss)}" if round else "")
        elif self.done < self.rounds:
            bars.add_row("round", f"{self.done + 1}/{self.rounds}", Bar(self.rounds, self.done), "")
        stage = self._stage
        training = stage is not None and stage.name == "training" and stage.outer is None
        bar = None if stage is None or not stage.total else Bar(stage.total, min(stage.done, stage.total))
        if self._baseline is None and self.done < self.rounds and (training or bar is None):
            cohort, losses = len(prepared.federation.draw_cohort(self.done)), list(self._losses.values())
            description = (
                f"loss {format_number(sum(losses) / len(losses))}  {shorten(self._last, 20)}" if losses else ""
            )
            bars.add_row("clients", f"{len(losses)}/{cohort}", bar or Bar(cohort, len(losses)), Text(description))
        elif stage is not None and stage.total:
            bars.add_row(stage.unit, f"{min(stage.done, stage.total)}/{stage.total}", bar, "")
        return [bars] if bars.row_count else []
