"""Stages of a run's work and how much of each is done: the one source of every progress display.

Code that takes long opens a stage and counts what is done; an observer receives the innermost open stage after every
change (``progress.listener.Listener.on_stage_change``).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import RLock
from typing import Literal

StageName = Literal[
    "data",
    "model",
    "encoding",
    "workers",
    "nodes",
    "hidden states",
    "reference",
    "statistics",
    "stacking",
    "learning rate",
    "training",
    "evaluation",
    "diagnostics",
    "export",
]
"""``workers``: their start on a cluster. ``nodes``: waiting until enough of them participate. ``hidden states``: those
that leave the frozen prefix, computed once an example. ``reference``: outputs of the pretrained model, once an example,
for tasks that compare with them. ``statistics``: those from which the head starts. ``stacking``: measuring how many
clients train at once. ``learning rate``: the range test. ``training``: a round's clients, and the server's half of the
round after them."""


@dataclass(frozen=True)
class Stage:
    """A stage of a run's work.

    Args:
        name: Name of the stage.
        done: Number of units that are done.
        total: Expected number of units; None: unknown.
        unit: Plural of what is counted.
        outer: The stage within which this one runs; None: there is none.
    """

    name: StageName
    done: int = 0
    total: int | None = None
    unit: str = "examples"
    outer: Stage | None = None

    def is_within(self, name: StageName) -> bool:
        """Check whether this is a stage of that name, or runs within one."""
        return self.name == name or (self.outer is not None and self.outer.is_within(name))


class Stages:
    """The open stages of a run; several threads may count in them.

    Args:
        observer: Receives the innermost open stage after every change, None once no stage is open; it must return
            quickly. None: there is no observer.
    """

    def __init__(self, observer: Callable[[Stage | None], None] | None = None) -> None:
        self._observer = observer
        self._open: list[Stage] = []
        self._users: list[int] = []
        self._lock = RLock()

    @contextmanager
    def stage(self, name: StageName, total: int | None = None, unit: str = "examples") -> Generator[None]:
        """Open a stage for the time of this context; a thread joins the stage of that name that is innermost."""
        with self._lock:
            if self._open and self._open[-1].name == name:
                outer = self._open[-1]
                total_of_both = None if outer.total is None or total is None else outer.total + total
                self._open[-1] = replace(outer, total=total_of_both)
                self._users[-1] += 1
            else:
                self._open.append(Stage(name, 0, total, unit, self._open[-1] if self._open else None))
                self._users.append(1)
            self._show()
        try:
            yield
        finally:
            with self._lock:
                index = self._find(name)
                assert index is not None
                self._users[index] -= 1
                if not self._users[index]:
                    del self._open[index], self._users[index]
                self._show()

    def advance(self, name: StageName, count: int = 1) -> None:
        """Count units as done in the innermost open stage of a name; without such a stage, do nothing."""
        with self._lock:
            index = self._find(name)
            if index is not None:
                self.reach(name, self._open[index].done + count)

    def reach(self, name: StageName, done: int) -> None:
        """Raise the number of units that are done to ``done``, if it is smaller; otherwise as ``advance``."""
        with self._lock:
            index = self._find(name)
            if index is not None and self._open[index].done < done:
                self._open[index] = replace(self._open[index], done=done)
                self._show()

    def _find(self, name: StageName) -> int | None:
        matches = (index for index in reversed(range(len(self._open))) if self._open[index].name == name)
        return next(matches, None)

    def _show(self) -> None:
        if self._observer is not None:
            self._observer(self._open[-1] if self._open else None)
