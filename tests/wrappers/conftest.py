"""Wrapped methods, played like the methods themselves; each combination of options once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedspan.runs.setup import Prepared
from helpers.watched_rounds import Played, play
from helpers.wrapped_configs import PlayWrapped, wrapped_config


@pytest.fixture(scope="session")
def played_wrapped(tiny_folder: Path, prepared: Prepared) -> PlayWrapped:
    """``played_wrapped("fedit", ["fedprox"], section={...})``; the same object for the same options."""
    known: dict[str, Played] = {}

    def get(key: str, wrappers: Sequence[str | Mapping[str, Any]], **changes: Any) -> Played:
        name = f"{key} {wrappers} {sorted(changes.items())}"
        if name not in known:
            known[name] = play(prepared, wrapped_config(tiny_folder, key, wrappers, **changes))
        return known[name]

    return get
