"""Runs whose clients train on workers."""

from pathlib import Path
from typing import Any

from . import tiny


def config(folder: Path, engine: dict[str, Any] | None = None, **cluster: Any) -> Any:
    """All four clients, for long enough that a worker can die meanwhile."""
    changes: dict[str, Any] = {"federation": {"clients_per_round": None}, "training": {"local_steps": 40}}
    cluster = {"workers": 2, "start_timeout": 60.0, **cluster}
    return tiny.config(folder, **changes, engine=engine or {}, cluster=cluster)
