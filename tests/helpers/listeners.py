"""Listeners of runs and series that record what they hear, and interrupt."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedspan.experiments.series import Step, Watcher
from fedspan.progress.listener import Listener


class Notes(Listener):
    """Records notes; interrupts the run after a round if asked to, as Ctrl-C does."""

    def __init__(self, stop: int | None = None) -> None:
        self.notes: list[str] = []
        self.stop = stop

    def on_note(self, text: str) -> None:
        self.notes.append(text)

    def on_round_finish(self, row: Mapping[str, Any]) -> None:
        if row["round"] == self.stop:
            raise KeyboardInterrupt


class RecordingWatcher(Watcher):
    """Records the runs of a series by name; interrupts one after a round if asked to."""

    def __init__(self, stop_in: str = "", after: int = 1) -> None:
        self.planned, self.finished, self.failed = list[str](), list[str](), list[str]()
        self.scores: dict[str, float | None] = {}
        self.begun: dict[str, int] = {}
        self._stop, self._now = (stop_in, after), ""

    def on_series_start(self, steps: Sequence[Step]) -> None:
        self.planned = [step.name for step in steps]

    def on_run_start(self, step: Step) -> None:
        self._now = step.name

    def on_start(self, prepared: Any, done: int, resumed: bool) -> None:
        self.begun[self._now] = done

    def on_round_finish(self, row: Mapping[str, Any]) -> None:
        if (self._now, row["round"]) == self._stop:
            raise KeyboardInterrupt

    def on_run_finish(self, step: Step, metric: str, value: float | None, seconds: float, is_new: bool) -> None:
        self.scores[step.name] = value
        if is_new:
            self.finished.append(step.name)

    def on_run_failure(self, step: Step, why: str) -> None:
        self.failed.append(step.name)
