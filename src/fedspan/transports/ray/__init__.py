"""A simulation whose clients train in the actors of a Ray cluster. Nothing else in fedspan imports ``ray``.

Importing this package disables Ray's usage statistics. Set ``RAY_USAGE_STATS_ENABLED`` beforehand to enable them.

Ray transmits Python objects as pickles and lets anyone who reaches its ports run code: driver and workers are one
user's own machines, on a network of their own.
"""

import importlib.util
import os

from fedspan.errors import FedspanError, build_install_command

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # or Ray warns; workers without GPUs use none anyway


def require_ray() -> None:
    """Check that Ray is installed."""
    if importlib.util.find_spec("ray") is None:
        raise FedspanError(
            "ray", None, problem=f"the config's cluster needs this package. Run: {build_install_command('cluster')}"
        )
