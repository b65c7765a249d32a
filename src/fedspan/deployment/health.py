"""Health of a node: a file in its folder whose time advances while its loop runs or its training makes progress.

While a node waits for orders, its loop renews the heartbeat; while it carries one out, the stages of its work do (every
batch counts). So a node whose loop or whose training hangs has an old heartbeat, whichever process hangs.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from pathlib import Path

from fedspan.files import write_atomic
from fedspan.training.stages import Stage

STUCK_SECONDS = 900.0
"""Age of the heartbeat in seconds above which a node is unhealthy."""
_LOADING_SECONDS = 3600.0
"""The same while a model is loaded, which may have to be downloaded."""
_LOADING = frozenset({"model", "data"})

_FILE = "heartbeat"
_INTERVAL = 5.0
"""Seconds between two renewals of a heartbeat that says the same."""
_WAITING = "waiting for orders"

log = logging.getLogger("fedspan.node")


class Heartbeat:
    """A process's view of a node's heartbeat."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._doing: str | None = None
        self._percent: int | None = None
        self._renewed = float("-inf")
        self.hides_shares = False
        """Whether the heartbeat hides stages and their shares, which tell how many examples it has and which fail."""

    def renew(self, doing: str = _WAITING, percent: int | None = None) -> None:
        """Renew the heartbeat, at most every few seconds while the node does the same.

        Args:
            percent: How much of it is done; None: unknown.
        """
        now = time.monotonic()
        if doing == self._doing and now - self._renewed < _INTERVAL:
            return
        path, is_same = self._folder / _FILE, (doing, percent) == (self._doing, self._percent)
        self._doing, self._percent, self._renewed = doing, percent, now
        try:
            if is_same and path.is_file():
                os.utime(path)
            else:
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                write_atomic(path, (doing if percent is None else f"{doing}\n{percent}").encode(), 0o600)
        except OSError as error:  # the node goes on, and its health check reports the old heartbeat
            log.warning("the heartbeat cannot be written (%s)", error)
        self.notify_watchdog()

    def observe(self, stage: Stage | None) -> None:
        """Renew the heartbeat after a change of the innermost stage of the node's work (``Stages``)."""
        if stage is None:
            self.renew(self._doing or _WAITING, self._percent)
            return
        while self.hides_shares and stage.outer is not None:
            stage = stage.outer
        total = None if self.hides_shares else stage.total
        self.renew(stage.name, min(100, 100 * stage.done // total) if total else None)

    def notify_watchdog(self) -> None:
        """Tell systemd that the node works, if systemd asks for it and the heartbeat is not too old."""
        address = os.environ.get("NOTIFY_SOCKET")
        if not address or find_problem(self._folder) is not None:
            return
        path = f"\0{address[1:]}" if address.startswith("@") else address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier:
                notifier.sendto(b"WATCHDOG=1", path)
        except OSError as error:
            log.warning("systemd's watchdog cannot be notified (%s)", error)


def find_problem(folder: Path, seconds: float = STUCK_SECONDS) -> str | None:
    """Return why a node does not work, as a sentence; None: it works.

    Args:
        seconds: Age of the heartbeat above which the node is unhealthy; while it loads a model, an hour if that is
            more.
    """
    heartbeat = _read_heartbeat(folder)
    if heartbeat is None:
        return f"the node has not started: {folder / _FILE} is missing"
    doing, _, age = heartbeat
    limit = max(seconds, _LOADING_SECONDS) if doing in _LOADING else seconds
    if age <= limit:
        return None
    return f"no progress for {age:.0f} s, and at most {limit:g} s are allowed (last: {doing})"


def describe_heartbeat(folder: Path) -> str:
    """Return what a node did last and when, as a clause."""
    heartbeat = _read_heartbeat(folder)
    if heartbeat is None:
        return "no heartbeat"
    doing, percent, age = heartbeat
    return f"{doing}{'' if percent is None else f' ({percent} %)'}, {age:.0f} s ago"


def read_work(folder: Path) -> tuple[str, int | None] | None:
    """Return what a node does, and how many percent of it are done if that is known; None: it waits for orders."""
    heartbeat = _read_heartbeat(folder)
    return None if heartbeat is None or heartbeat[0] == _WAITING else heartbeat[:2]


def _read_heartbeat(folder: Path) -> tuple[str, int | None, float] | None:
    """Return what a node did last, how much of it in percent, and how many seconds ago; None: no heartbeat."""
    path = folder / _FILE
    try:
        text, age = path.read_bytes().decode(errors="replace")[:64], max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return None
    doing, _, percent = text.partition("\n")
    return doing, int(percent) if percent.isdecimal() else None, age
