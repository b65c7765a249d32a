"""The progress of a run within a round, in a small file of its folder that other processes may read.

``metrics.jsonl`` has finished rounds only. ``progress.json`` has the round that is being run: its clients, the losses
of those that replied, the failures of others, and the current stage. It is replaced at most twice a second, by a
thread that no other one waits for, and removed when the run is finished. After a failure it holds the reason.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock, Timer
from typing import Any, Self

from fedspan.assembly.run import Prepared
from fedspan.errors import FedspanError
from fedspan.files import build_temporary_path, remove, to_json
from fedspan.progress.listener import Listener
from fedspan.progress.remaining_time import describe_stage
from fedspan.tasks.metrics import METRICS
from fedspan.training.stages import Stage

INTERVAL = 0.5
"""Shortest time between two writes, in seconds."""
_COST = 50
"""A write that takes ``t`` seconds is followed by a pause of at least ``_COST * t``: at most 2 % of the time."""
_LONGEST_REASON = 500
"""Longest reason of a failure that the file holds, in characters."""
_NOTES = 20


class ProgressFile(Listener):
    """Writes the progress of a run while it is entered as a context manager, which the owner of the run's lock does.

    The file is not flushed to the disk: after a power cut it may be missing, and nothing depends on it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        self._file_lock = Lock()
        """Held while the file is written, which may take long, and never waited for while holding ``_lock``."""
        self._is_open = False
        self._is_changed = False
        self._is_drawn = True
        """Whether a round has a cohort; the clients of asynchronous rounds are reported by and by."""
        self._is_redrawn = False
        self._next_write = 0.0
        self._timer: Timer | None = None
        self._prepared: Prepared | None = None
        self._notes: deque[str] = deque(maxlen=_NOTES)
        self._losses: dict[str, float] = {}
        self._failures: dict[str, str] = {}
        self._state: dict[str, Any] = {"state": "running"}

    def __enter__(self) -> Self:
        self._write(self._build_content())
        self._is_open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        with self._lock:
            self._is_open = False
            if self._timer is not None:
                self._timer.cancel()
            if error is not None:
                self._state |= _describe_error(error)
            content = self._build_content()
        with self._file_lock:
            if error is not None:
                self._write(content)
                return
            with suppress(OSError):  # a file that is left is not read once there is a report
                remove(self._path)

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
            self._request_write()

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

    def on_round_start(self, round: int) -> None:
        with self._lock:
            assert self._prepared is not None
            federation = self._prepared.federation
            self._is_drawn = federation.settings.buffered is None
            cohort = list(federation.draw_cohort(round - 1)) if self._is_drawn else []
            self._set_round({"round": round, "round_started": time.time(), "cohort": cohort})

    def on_client_order(self, round: int, client: str) -> None:
        with self._lock:
            self._add_client(client)
            self._request_write()

    def on_client_finish(self, round: int, client: str, loss: float) -> None:
        with self._lock:
            self._losses[client] = loss
            self._failures.pop(client, None)  # that of an attempt before
            if not self._is_drawn:  # the order may have been of a round before
                self._add_client(client)
            elif client not in self._state.get("cohort", ()) and not self._is_redrawn and self._prepared is not None:
                # A client that joined after the last round has finished is known once the round has begun.
                self._state["cohort"] = list(self._prepared.federation.draw_cohort(round - 1))
                self._is_redrawn = True
            self._request_write()

    def _add_client(self, client: str) -> None:
        if client not in self._state["cohort"]:
            self._state["cohort"] = [*self._state["cohort"], client]

    def on_client_failure(self, round: int, client: str, reason: str) -> None:
        with self._lock:
            self._losses.pop(client, None)  # of a reply that is rejected after its arrival
            self._failures[client] = reason[:_LONGEST_REASON]
            self._request_write()

    def on_round_finish(self, row: Mapping[str, Any]) -> None:
        with self._lock:  # it is not known yet whether another round follows
            self._set_round({"round": None, "round_started": None, "cohort": []})

    def on_baseline_start(self, name: str, rounds: int) -> None:
        self._set_baseline(name, 0, rounds)

    def on_baseline_round(self, name: str, round: int, loss: float) -> None:
        self._set_baseline(name, round, None)

    def _set_baseline(self, name: str, round: int, rounds: int | None) -> None:
        with self._lock:
            before = self._state.get("baseline") or {}
            total = before.get("rounds") if rounds is None else rounds
            self._state["baseline"] = {"name": name, "round": round, "rounds": total}
            self._request_write()

    def _set_round(self, values: Mapping[str, Any]) -> None:
        """Replace the round that is being run, of which nothing is known yet."""
        self._losses.clear()
        self._failures.clear()
        self._is_redrawn = False
        self._state |= values
        self._request_write()

    def _request_write(self) -> None:
        """Have a thread write the file: now, or, soon after another write, a little later. ``_lock`` is held."""
        self._is_changed = True
        if self._is_open and self._timer is None:
            self._start_timer()

    def _start_timer(self) -> None:
        self._timer = Timer(max(0.0, self._next_write - time.monotonic()), self._write_changes)
        self._timer.daemon = True
        self._timer.start()

    def _write_changes(self) -> None:
        with self._file_lock:
            with self._lock:
                if not self._is_open:
                    return
                self._is_changed = False
                content = self._build_content()
            self._write(content)
        with self._lock:
            self._timer = None
            if self._is_open and self._is_changed:
                self._start_timer()

    def _build_content(self) -> dict[str, Any]:
        return {
            **self._state,
            "updated": time.time(),
            "replied": list(self._losses),
            "losses": {client: loss for client, loss in self._losses.items() if math.isfinite(loss)},
            "failures": dict(self._failures),
            "notes": list(self._notes),
        }

    def _write(self, content: Mapping[str, Any]) -> None:
        began = time.monotonic()
        # A disk that is full or gone stops the run when the round is saved, with its own error.
        with suppress(OSError):
            partial = build_temporary_path(self._path)
            partial.write_text(to_json(content), encoding="utf-8", errors="backslashreplace")
            partial.replace(self._path)
        now = time.monotonic()
        self._next_write = now + max(INTERVAL, _COST * (now - began))


def _describe_error(error: BaseException) -> dict[str, str]:
    if isinstance(error, KeyboardInterrupt):
        return {"state": "interrupted", "reason": "interrupted (Ctrl-C)"}
    text = str(error) if isinstance(error, FedspanError) else f"{type(error).__name__}: {error}"
    return {"state": "failed", "reason": text[:2000]}
