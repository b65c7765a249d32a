"""Paths of a run's files in a node's folder."""

from __future__ import annotations

import hashlib
import re
import time
from contextlib import suppress
from pathlib import Path

from fedspan.clients.secagg_store import remove_secrets
from fedspan.files import remove

LAST_ORDER = "serial"

LAST_REPLY = f"{LAST_ORDER}-reply"
"""The file in a run's folder with the reply to it."""

SESSIONS = "sessions"
"""The folder in a node's folder with the last secure session of each run, whose number no later session may have."""

STATE = "kept"
"""The folder in a run's folder with the client's state between rounds."""

SUMS = "sums"
"""The folder in a node's folder with the secure sums of which the node revealed shares, by data set."""

TRAINING = "training"
"""The folder in a run's folder with the progress of the training of its newest order."""

WORKER = "worker"
"""The role in a node's folder of the process that carries out its orders."""


def get_run_folder(folder: Path, run: str) -> Path:
    """Return the folder of a run's state in a node's folder."""
    return folder / hashlib.sha256(run.encode()).hexdigest()[:32]


_RUN_FOLDER = re.compile(r"[0-9a-f]{32}")
_OLD_DAYS = 30
"""Days without an order after which a run's state is removed."""


def remove_old_states(folder: Path) -> int:
    """Remove what runs without an order for a month need to continue, and return the number of these runs.

    What limits, replays and audits refer to stays (invitation, last order, number of the last secure session, key of
    the noise), and so does the adapter.
    """
    latest, runs = time.time() - _OLD_DAYS * 86400, 0
    for path in folder.iterdir():
        states = [path / name for name in (STATE, TRAINING, LAST_REPLY) if (path / name).exists()]
        if _RUN_FOLDER.fullmatch(path.name) and states:
            with suppress(OSError):  # tried again with the next run
                if max(entry.stat().st_mtime for entry in path.iterdir()) < latest:
                    for state in states:
                        remove(state)
                    runs += 1
    remove_secrets(folder / SESSIONS, latest)
    return runs
