"""The events that a run reports to a listener."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedspan.runs.setup import Prepared

__all__ = ["Listener"]


class Listener:
    """Receives the events of a run; every method does nothing by default."""

    def environment_changed(self, changes: Mapping[str, tuple[object, object]]) -> None:
        """A run resumes with other versions or threads, ``{name: (then, now)}``: its last bits may differ."""

    def started(self, prepared: Prepared, done: int, resumed: bool) -> None:
        """The run is built; ``done`` rounds are already finished."""

    def noted(self, text: str) -> None:
        """A note for the user is available: one sentence without its full stop."""

    def client_finished(self, round: int, client: str, loss: float) -> None:
        """A client has finished training (rounds count from 1)."""

    def round_finished(self, row: Mapping[str, Any]) -> None:
        """A round is committed; ``row`` is its line of metrics.jsonl."""

    def baseline_started(self, name: str, rounds: int) -> None:
        """A baseline starts to train."""

    def baseline_round(self, name: str, round: int, loss: float) -> None:
        """An epoch of a baseline is finished."""
