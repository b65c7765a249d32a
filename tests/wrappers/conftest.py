"""Wrapped methods, run like the methods themselves; each combination of options once."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedspan.assembly.run import Prepared
from helpers.watched_rounds import MethodRun, run_watched
from helpers.wrapped_configs import RunWrapped, wrapped_config


@pytest.fixture(scope="session")
def run_wrapped(tiny_folder: Path, prepared: Prepared) -> RunWrapped:
    """``run_wrapped("fedit", ["fedprox"], section={...})``; the same object for the same options."""
    known: dict[str, MethodRun] = {}

    def get(key: str, wrappers: Sequence[str | Mapping[str, Any]], **changes: Any) -> MethodRun:
        name = f"{key} {wrappers} {sorted(changes.items())}"
        if name not in known:
            known[name] = run_watched(prepared, wrapped_config(tiny_folder, key, wrappers, **changes))
        return known[name]

    return get
