"""The pages of the wrappers: their snippets are configs, their tables of options are the registry's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from fedspan.config import parse_config
from fedspan.wrappers.describe import list_wrappers

PAGES = Path(__file__).parents[2] / "docs" / "methods"
PAGE = {"fedadagrad": "fedadam", "fedyogi": "fedadam", "fedavgm": "fedadam"}
"""Of wrappers that share one."""


@pytest.mark.parametrize("name", sorted({*(PAGE.get(row.key, row.key) for row in list_wrappers()), "fedavg"}))
def test_snippets_are_configs(name: str) -> None:
    snippets = re.findall(r"```yaml\n(.*?)```", (PAGES / f"{name}.md").read_text(encoding="utf-8"), re.DOTALL)
    assert snippets
    for snippet in snippets:
        parse_config({"data": {"train": "train.csv"}, **yaml.safe_load(snippet)})


@pytest.mark.parametrize("row", list_wrappers(), ids=lambda row: row.key)
def test_every_option_and_its_default_is_on_the_page(row: object) -> None:
    page = (PAGES / f"{PAGE.get(row.key, row.key)}.md").read_text(encoding="utf-8")  # type: ignore[attr-defined]
    lines = {line.split(" | ")[0].strip("| `"): line for line in page.splitlines() if line.startswith("| `")}
    for option in row.options:  # type: ignore[attr-defined]
        assert str(option.default) in lines[option.name].replace("fedavgm 1 ", "1.0 ").replace("fedadagrad 0 ", "0.0 ")
