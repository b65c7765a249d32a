"""The configs that docs/tasks.md shows are configs; the pages that are written by a script are current."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedspan.config import parse_config

_PAGE = (Path(__file__).parents[1] / "docs" / "tasks.md").read_text(encoding="utf-8")
_SNIPPETS = re.findall(r"```yaml\n(.*?)```", _PAGE, re.DOTALL)


@pytest.mark.parametrize("text", _SNIPPETS, ids=[text.split("\n")[0].replace(" ", "") for text in _SNIPPETS])
def test_a_snippet_parses(text: str) -> None:
    values: dict[str, Any] = yaml.safe_load(text)
    config = parse_config({"data": {"train": "train.csv"}, **values})
    assert config.task == values.get("task", "sequence-classification")
    dumped = config.model_dump(mode="json")
    for section, given in values.items():
        if isinstance(given, dict):
            assert {name: dumped[section][name] for name in given} == given


def test_the_pages_of_the_config_and_of_a_node_s_file_are_current() -> None:
    docs = Path(__file__).parents[1] / "docs"
    spec = importlib.util.spec_from_file_location("generate_config", docs / "generate_config.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for page, written in (("config.md", module.page()), ("node.md", module.node_page())):
        assert (docs / page).read_text(encoding="utf-8") == written, "run: python docs/generate_config.py"
