"""The methods on Flower's simulation and deployment engines. Nothing else in fedspan imports ``flwr``.

Importing this package disables Flower's and Ray's telemetry and update checks, and Flower's installation of an app's
dependencies at run time. Set the variables below beforehand to enable them.
"""

import importlib.util
import os

from fedspan.errors import FedspanError, build_install_command

__all__ = ["require"]

_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}

for _name, _value in _QUIET.items():
    os.environ.setdefault(_name, _value)


def require(*, simulation: bool = False) -> None:
    """Check that Flower is installed.

    Args:
        simulation: Whether Flower's simulation engine (Ray) is needed, too.

    Raises:
        FedspanError: If Flower is missing.
    """
    extras = {"flwr": "flower", **({"ray": "flower-sim"} if simulation else {})}
    for package, extra in extras.items():
        if importlib.util.find_spec(package) is None:
            raise FedspanError(
                package, None, problem=f"the package is not installed. Run: {build_install_command(extra)}"
            )
