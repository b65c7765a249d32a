"""Events of a series of runs, for listeners."""

from __future__ import annotations

from collections.abc import Sequence

from fedspan.experiments.series import Step
from fedspan.progress.listener import Listener, Listeners, pass_on


class Watcher(Listener):
    """Listener for the events of a series and of its runs; every method does nothing by default."""

    def on_series_start(self, steps: Sequence[Step]) -> None:
        """Handle the start of a series: all runs are planned and the folder exists."""

    def on_run_start(self, step: Step) -> None:
        """Handle the start of a run, which is loaded, or read if it is already finished."""

    def on_run_finish(self, step: Step, metric: str, value: float | None, seconds: float, is_new: bool) -> None:
        """Handle the report of a run; ``value`` is the compared score, ``is_new`` is False for a run that was read."""

    def on_run_failure(self, step: Step, reason: str) -> None:
        """Handle the divergence of a run; the series continues without it."""


class Watchers(Listeners, Watcher):
    """Passes every event of a series on to several watchers, in their order."""


pass_on(Watcher, Watchers)
