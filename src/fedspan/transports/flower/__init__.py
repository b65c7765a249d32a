"""The methods as a Flower app, on Flower's public interface alone, so that a range of its releases works."""

import importlib.util

from fedspan.errors import FedspanError, build_install_command


def require() -> None:
    """Check that Flower is installed."""
    if importlib.util.find_spec("flwr") is None:
        problem = f"the package is not installed. Run: {build_install_command('flower')}"
        raise FedspanError("flwr", None, problem=problem)
