"""Typer's module that draws help, imported without what only Markdown and pretty tracebacks need.

Up to version 0.29, ``typer.rich_utils`` imports ``rich.markdown`` and ``rich.traceback``, and with them Pygments and a
parser of Markdown: a fifth of the time of ``fedspan --help``, which uses neither.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

_DEFERRED = {"rich.markdown": "Markdown", "rich.traceback": "Traceback"}
"""The classes of Rich that ``typer.rich_utils`` imports and only uses in calls, by their modules."""


class _DeferredClass(type):
    """Metaclass of a stand-in that imports the class in its place at the first call or access to an attribute."""

    def __call__(cls, *args: Any, **settings: Any) -> Any:
        return _import_class(cls)(*args, **settings)

    def __getattr__(cls, name: str) -> Any:
        return getattr(_import_class(cls), name)


def _import_class(stand_in: type) -> Any:
    return getattr(importlib.import_module(stand_in.__module__), stand_in.__name__)


def import_rich_help() -> None:
    """Import ``typer.rich_utils``, with stand-ins for the classes whose modules have not been imported before."""
    if "typer.rich_utils" in sys.modules:
        return
    added: list[str] = []
    for module, name in _DEFERRED.items():
        if module not in sys.modules:
            sys.modules[module] = ModuleType(module)
            setattr(sys.modules[module], name, _DeferredClass(name, (), {"__module__": module}))
            added.append(module)
    try:
        importlib.import_module("typer.rich_utils")
    finally:
        for module in added:
            del sys.modules[module]
