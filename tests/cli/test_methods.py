"""``fedspan methods`` and the tables of methods and wrappers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from click.testing import Result

import fedspan
from fedspan.methods.describe import describe
from fedspan.methods.registry import METHODS
from fedspan.wrappers.describe import describe as describe_wrappers
from fedspan.wrappers.registry import WRAPPERS
from helpers.command_line import done

Call = Callable[..., Result]


def test_methods(call: Call) -> None:
    shown = done(call("methods"))
    rows = json.loads(done(call("methods", "--json")))
    assert [(row["role"], row["key"]) for row in rows] == [
        *(("method", key) for key in sorted(METHODS)),
        *(("wrapper", key) for key in sorted(WRAPPERS)),
    ]
    for row in rows:
        assert row["key"] in shown
        assert row["cls"] == {**METHODS, **WRAPPERS}[row["key"]].__name__
    one = done(call("methods", "fedloru"))
    assert "method.tau" in one
    assert "rounds between accumulations" in one
    wrapper = done(call("methods", "fedprox"))
    assert "wrappers: [{name: fedprox, mu: 0.01}]" in wrapper
    assert "strength" in wrapper
    assert [row["key"] for row in json.loads(done(call("methods", "fedprox", "--json")))] == ["fedprox"]


def test_the_table_of_methods_is_that_of_the_registry() -> None:
    path = Path(fedspan.__file__).parent / "methods" / "table.json"
    assert json.loads(path.read_text()) == describe(), "write it anew: python -m fedspan.methods.describe"
    for row in describe():
        assert row["name"]
        assert row["idea"]


def test_the_table_of_wrappers_is_that_of_the_registry() -> None:
    path = Path(fedspan.__file__).parent / "wrappers" / "table.json"
    rows = describe_wrappers()
    assert json.loads(path.read_text()) == rows, "write it anew: python -m fedspan.wrappers.describe"
    for row in rows:
        assert row["name"]
        assert row["idea"]
        assert all(option["help"] for option in row["options"])
        assert all(option["help"] for option in row["options"]), f"describe each option of {row['cls']} under Args:"
