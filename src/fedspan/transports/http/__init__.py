"""Deployments over HTTPS: a server and its nodes (Starlette on uvicorn, httpx, SQLite, cryptography)."""

import importlib.util

from fedspan.errors import FedspanError, build_install_command


def require() -> None:
    """Check that the packages of a deployment are installed."""
    for package in ("cryptography", "httpx", "starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise FedspanError(
                package, None, problem=f"the package is not installed. Run: {build_install_command('deploy')}"
            )
