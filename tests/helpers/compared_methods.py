"""A config of runs that are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers import tiny


def values_of(folder: Path, **changes: Any) -> dict[str, Any]:
    """Values of a config of two rounds with both baselines, unless they are changed."""
    changes = {"method": {"tau": 1}, "federation": {"rounds": 2}, **changes}
    return {**tiny.settings(folder, **changes), "baselines": ["local", "centralized"]}
