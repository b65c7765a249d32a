"""The pages that are written by a script are current."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def test_the_pages_of_the_config_and_of_a_node_s_file_are_current() -> None:
    docs = Path(__file__).parents[2] / "docs"
    spec = importlib.util.spec_from_file_location("generate_config", docs / "generate_config.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for page, written in (("config.md", module.page()), ("node.md", module.node_page())):
        assert (docs / page).read_text(encoding="utf-8") == written, "run: python docs/generate_config.py"
