"""Where a node keeps what belongs to a run."""

from __future__ import annotations

import hashlib
from pathlib import Path

__all__ = ["LAST_ORDER", "TRAINING", "get_run_folder"]

LAST_ORDER = "serial"
"""The file in a run's folder with its last order."""

TRAINING = "training"
"""The folder in a run's folder with the progress of the training of its newest order."""


def get_run_folder(folder: Path, run: str) -> Path:
    """Return the folder of a run's state in a node's folder."""
    return folder / hashlib.sha256(run.encode()).hexdigest()[:32]
