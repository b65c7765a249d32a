"""The pages of the wrappers: their tables of options are the registry's."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedspan.wrappers.describe import list_wrappers

PAGES = Path(__file__).parents[2] / "docs" / "methods"
PAGE = {"fedadagrad": "fedadam", "fedyogi": "fedadam", "fedavgm": "fedadam"}
"""Of wrappers that share one."""


@pytest.mark.parametrize("row", list_wrappers(), ids=lambda row: row.key)
def test_every_option_and_its_default_is_on_the_page(row: object) -> None:
    page = (PAGES / f"{PAGE.get(row.key, row.key)}.md").read_text(encoding="utf-8")  # type: ignore[attr-defined]
    lines = {line.split(" | ")[0].strip("| `"): line for line in page.splitlines() if line.startswith("| `")}
    for option in row.options:  # type: ignore[attr-defined]
        assert str(option.default) in lines[option.name].replace("fedavgm 1 ", "1.0 ").replace("fedadagrad 0 ", "0.0 ")
