"""YAML from others: short texts that stand for very much are refused at once, wherever YAML is read."""

import ast
import time
from pathlib import Path

import pytest

from fedspan.config import load_yaml, override, parse_yaml
from fedspan.config.node import load_node
from fedspan.errors import FedspanError
from fedspan.experiments.execution import open_series, read_settings

SOURCE = Path(__file__).resolve().parents[2] / "src" / "fedspan"
PACKAGED = {"config/reading.py", "data/catalogue.py", "reproduction/presets.py"}
"""The module with the bounds, and those that read files of the package only."""


def laugh(levels: int) -> str:
    """A section with one value, ten to the power of the levels times."""
    lists = [f"l{level}: &l{level} [{', '.join([f'*l{level - 1}'] * 10)}]" for level in range(1, levels + 1)]
    return "\n".join(["data:", "  l0: &l0 lol", *(f"  {line}" for line in lists)])


def test_aliases_are_refused_at_once(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(FedspanError, match=r"it has an alias \(\*l0\)"):
        override(parse_yaml(laugh(9), "config.yaml"), ())
    path = tmp_path / "node.yaml"
    path.write_text(laugh(9))
    with pytest.raises(FedspanError, match="alias"):
        load_node(path)
    with pytest.raises(FedspanError, match="--set"):
        override({}, ["data.labels=[&a [1], *a]"])
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("text", ["a: &a [*a]", "? [", "!!int _", "2026-13-01", "[" * 50, "a: [", "!!python/none x"])
def test_every_mistake_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        load_yaml(text)


def test_settings_that_share_a_list_are_read_again(tmp_path: Path) -> None:
    shared = [1, 2]
    open_series(tmp_path / "series", "sweep.yaml", {"over": {"a": shared, "b": shared}}, ())
    assert read_settings(tmp_path / "series", "sweep.yaml", {"over": dict})["over"] == {"a": [1, 2], "b": [1, 2]}


def test_no_other_module_parses_yaml() -> None:
    parsing = set[str]()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "yaml" and "load" in node.attr:
                parsing.add(path.relative_to(SOURCE).as_posix())
    assert parsing == PACKAGED
