"""Every method, played; each combination of options once for all tests that look at it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedspan.runs.setup import Prepared
from helpers.watched_rounds import Play, Played, method_config, play


@pytest.fixture(scope="session")
def played(tiny_folder: Path, prepared: Prepared) -> Play:
    """``played(key, section={...})``: a method's rounds on the tiny BERT; the same object for the same options."""
    known: dict[str, Played] = {}

    def get(key: str, **changes: Mapping[str, Any]) -> Played:
        name = f"{key} {sorted(changes.items())}"
        if name not in known:
            known[name] = play(prepared, method_config(tiny_folder, key, **changes))
        return known[name]

    return get
