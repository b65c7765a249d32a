"""A config of the trials of a search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers import tiny


def values_of(folder: Path, **changes: Any) -> dict[str, Any]:
    """Values of a config of three rounds with a baseline, unless they are changed."""
    values = tiny.settings(folder, **{"federation": {"rounds": 3}, "partition": {"validation": 0.3}, **changes})
    return {**values, "baselines": ["local"]}
