"""Methods and tasks that installed packages declare as entry points."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from fedspan.errors import FedspanError


def load_installed(group: str, name: str, field: str) -> tuple[str, Any] | None:
    """Load what an installed package declares under a name; None: no package declares it.

    Returns:
        Where the package has it (``module:attribute``), and the object.
    """
    for entry_point in entry_points(group=group, name=name):
        try:
            return entry_point.value, entry_point.load()
        except Exception as error:  # a package's import may raise anything
            reason = f"{type(error).__name__}: {error}"
            raise FedspanError(field, name, problem=f"{entry_point.value} cannot be imported ({reason})") from error
    return None
