"""Names of the trackers, and whether they are installed; importing this module loads no large library."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from fedspan.errors import FedspanError

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
"""Names of the trackers, which are also their package names."""


def require_trackers(names: Sequence[str]) -> None:
    """Check that trackers are known and installed.

    Raises:
        FedspanError: If a tracker is unknown or not installed.
    """
    for name in names:
        if name not in TRACKERS:
            raise FedspanError("track", name, f"one of {', '.join(TRACKERS)}")
        if importlib.util.find_spec(name) is None:
            raise FedspanError("track", name, problem=f"the package {name} is missing. Run: pip install {name}")
