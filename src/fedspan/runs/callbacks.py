"""What a run tells whoever watches it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedspan.runs.setup import Prepared

__all__ = ["Listener"]


class Listener:
    """What a run tells whoever watches; every method does nothing by default."""

    def environment_changed(self, changes: Mapping[str, tuple[object, object]]) -> None:
        """A run goes on under other versions or threads, ``{name: (then, now)}``: its last bits may differ."""

    def started(self, prepared: Prepared, done: int, resumed: bool) -> None:
        """Everything is built; ``done`` rounds are finished already."""

    def noted(self, text: str) -> None:
        """Something that a user should know, a sentence without its full stop."""

    def client_finished(self, round: int, client: str, loss: float) -> None:
        """A client has trained (rounds count from 1)."""

    def round_finished(self, row: Mapping[str, Any]) -> None:
        """A round is committed; ``row`` is its line of metrics.jsonl."""

    def baseline_started(self, name: str, rounds: int) -> None:
        """A baseline begins to train."""

    def baseline_round(self, name: str, round: int, loss: float) -> None:
        """A baseline's epoch is over."""
