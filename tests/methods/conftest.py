"""Every method, run; each combination of options once for all tests that inspect it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedspan.assembly.run import Prepared
from helpers.watched_rounds import MethodRun, RunMethod, method_config, run_watched


@pytest.fixture(scope="session")
def run_method(tiny_folder: Path, prepared: Prepared) -> RunMethod:
    """``run_method(key, section={...})``: a method's rounds on the tiny BERT; the same object for the same options."""
    known: dict[str, MethodRun] = {}

    def get(key: str, **changes: Mapping[str, Any]) -> MethodRun:
        name = f"{key} {sorted(changes.items())}"
        if name not in known:
            known[name] = run_watched(prepared, method_config(tiny_folder, key, **changes))
        return known[name]

    return get
