"""A listener of runs that interrupts them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedspan.runs.callbacks import Listener


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
