"""The progress of a run within a round, in a small file of its folder that other processes may read.

``metrics.jsonl`` has finished rounds only. ``progress.json`` has the round that is being run: its clients, the losses
of those that replied, and the current stage. It is replaced at most twice a second, and removed when the run is
finished. After a failure it holds the reason.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock, Timer
from typing import Any, Self

from fedspan.errors import FedspanError
from fedspan.files import build_temporary_path, remove, to_json
from fedspan.runs.callbacks import Listener
from fedspan.runs.formatting import get_title
from fedspan.runs.remaining_time import describe_stage
from fedspan.runs.setup import Prepared
from fedspan.tasks.metrics import METRICS
from fedspan.training.stages import Stage

__all__ = ["INTERVAL", "ProgressFile"]

INTERVAL = 0.5
"""Shortest time between two writes, in seconds."""
_COST = 50
"""A write that takes ``t`` seconds is followed by a pause of at least ``_COST * t``: at most 2 % of the time."""
_NOTES = 20
"""Number of notes that the file holds."""


class ProgressFile(Listener):
    """Writes the progress of a run while it is entered as a context manager, which the owner of the run's lock does.

    The file is not flushed to the disk: after a power cut it may be missing, and nothing depends on it.

    Args:
        path: The file.
        clock: Function that returns the time in seconds.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._lock = Lock()
        self._is_open = False
        self._is_redrawn = False
        self._next_write = 0.0
        self._timer: Timer | None = None
        self._prepared: Prepared | None = None
        self._notes: deque[str] = deque(maxlen=_NOTES)
        self._losses: dict[str, float] = {}
        self._state: dict[str, Any] = {"state": "running", "started": time.time()}

    def __enter__(self) -> Self:
        with self._lock:
            self._is_open = True
            self._write()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        with self._lock:
            if error is None:
                with suppress(OSError):  # a file that is left is not read once there is a report
                    remove(self._path)
            else:
                self._state |= _describe_error(error)
                self._write()
            self._is_open = False
            if self._timer is not None:
                self._timer.cancel()

    def on_start(self, prepared: Prepared, done: int, resumed: bool) -> None:
        metric = prepared.task.metric
        shown = METRICS.get(metric)
        with self._lock:
            self._prepared = prepared
            self._state |= {
                "metric": metric,
                "metric_title": metric if shown is None else shown.title,
                "is_percentage": shown is not None and shown.is_percentage,
                "clients": len(prepared.federation.clients),
                "rounds": prepared.federation.settings.rounds,
            }
            self._notes.extend(prepared.notes)
            self._begin_round(done)
            self._write()

    def on_note(self, text: str) -> None:
        with self._lock:
            self._notes.append(text)
            self._request_write()

    def on_stage_change(self, stage: Stage | None) -> None:
        with self._lock:
            self._state["stage"] = None
            if stage is not None:
                self._state["stage"] = {
                    "text": describe_stage(stage),
                    "done": stage.done,
                    "total": stage.total,
                    "unit": stage.unit,
                }
            self._request_write()

    def on_client_finish(self, round: int, client: str, loss: float) -> None:
        with self._lock:
            self._losses[client] = loss
            if client not in self._state.get("cohort", ()) and not self._is_redrawn and self._prepared is not None:
                # A client that joined after the last round has finished is known once the round has begun.
                self._state["cohort"] = list(self._prepared.federation.draw_cohort(round - 1))
                self._is_redrawn = True
            self._request_write()

    def on_round_finish(self, row: Mapping[str, Any]) -> None:
        with self._lock:
            self._begin_round(int(row["round"]))
            self._write()

    def on_baseline_start(self, name: str, rounds: int) -> None:
        self._set_baseline(name, 0, rounds)

    def on_baseline_round(self, name: str, round: int, loss: float) -> None:
        self._set_baseline(name, round, None)

    def _set_baseline(self, name: str, round: int, rounds: int | None) -> None:
        with self._lock:
            before = self._state.get("baseline") or {}
            total = before.get("rounds") if rounds is None else rounds
            self._state["baseline"] = {"name": get_title(name), "round": round, "rounds": total}
            self._request_write()

    def _begin_round(self, done: int) -> None:
        """Set the round after ``done`` finished ones, if there is one."""
        assert self._prepared is not None
        federation = self._prepared.federation
        rounds = federation.settings.rounds
        self._losses.clear()
        self._is_redrawn = False
        self._state |= {
            "round": min(done + 1, rounds),
            "round_started": time.time(),
            "cohort": list(federation.draw_cohort(done)) if done < rounds else [],
        }

    def _request_write(self) -> None:
        """Write now, or, soon after another write, a little later."""
        if not self._is_open or self._timer is not None:
            return
        wait = self._next_write - self._clock()
        if wait <= 0:
            self._write()
            return
        self._timer = Timer(wait, self._write_later)
        self._timer.daemon = True
        self._timer.start()

    def _write_later(self) -> None:
        with self._lock:
            self._timer = None
            if self._is_open:
                self._write()

    def _write(self) -> None:
        began = self._clock()
        losses = {client: loss for client, loss in self._losses.items() if math.isfinite(loss)}
        content = {
            **self._state,
            "pid": os.getpid(),
            "updated": time.time(),
            "replied": list(self._losses),
            "losses": losses,
            "notes": list(self._notes),
        }
        # A disk that is full or gone stops the run when the round is saved, with its own error.
        with suppress(OSError):
            partial = build_temporary_path(self._path)
            partial.write_text(to_json(content), encoding="utf-8", errors="backslashreplace")
            partial.replace(self._path)
        now = self._clock()
        self._next_write = now + max(INTERVAL, _COST * (now - began))


def _describe_error(error: BaseException) -> dict[str, str]:
    if isinstance(error, KeyboardInterrupt):
        return {"state": "interrupted", "reason": "interrupted (Ctrl-C)"}
    text = str(error) if isinstance(error, FedspanError) else f"{type(error).__name__}: {error}"
    return {"state": "failed", "reason": text[:2000]}
