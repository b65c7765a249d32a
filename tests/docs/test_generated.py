"""The pages that are written by a script are current."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import yaml

DOCS = Path(__file__).parents[2] / "docs"


def load(name: str) -> ModuleType:
    """Import a script of the documentation."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_of_the_config_and_of_a_node_s_file_are_current() -> None:
    module = load("generate_config")
    for page, written in (("config.md", module.page()), ("node.md", module.format_node_page())):
        assert (DOCS / page).read_text(encoding="utf-8") == written, "run: python docs/generate_config.py"


def test_every_page_is_in_the_navigation() -> None:
    nav = yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    listed = Counter(re.findall(r"[\w/.-]+\.md", str(nav)))
    assert listed == Counter(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


@pytest.mark.parametrize("front", ["README.md", "docs/index.md"])
def test_the_front_pages_count_the_families_of_the_page_of_models(front: str) -> None:
    page, text = ((DOCS.parent / name).read_text(encoding="utf-8") for name in ("docs/models.md", front))
    rows = page[page.index("| family |") :].split("\n\n", 1)[0].splitlines()[2:]
    trained = {row.split("|")[1] for row in rows if not row.endswith("| refused |")}  # some with several tasks
    assert f"[{len(trained)} tested model families](" in " ".join(text.split())


@pytest.mark.slow
def test_the_page_of_models_is_what_the_families_do() -> None:
    module = load("generate_models")
    written = (DOCS / "models.md").read_text(encoding="utf-8")
    assert written == module.page(), "run: python docs/generate_models.py"
