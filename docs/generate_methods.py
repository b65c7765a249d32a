"""Write the pages of methods from docstrings, claims and methods.yaml: ``python docs/generate_methods.py``."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import yaml

from fedspan.methods.describe import MethodRow, Option, list_methods
from fedspan.methods.registry import METHODS
from fedspan.wrappers.describe import WrapperRow, list_wrappers
from fedspan.wrappers.registry import WRAPPERS

DOCS = Path(__file__).parent
TABLES = DOCS / "method-tables.md"
FACTS: dict[str, dict[str, str]] = yaml.safe_load((DOCS / "methods.yaml").read_text(encoding="utf-8"))
COMMON = ("r", "lora_alpha", "use_rslora")
"""Options of every method, which docs/config.md explains."""
INTRO = """# All methods in tables

Set a method as `method.name` in your config, and wrappers in `method.wrappers`. Follow a key to its equations,
options and deviations. We recommend methods under [how to choose](choosing.md).

We count elements per layer, client and round, without the head. A layer has m outputs and n inputs, r is the
rank, r_i that of client i, K the number of replies. Run `fedspan plan` for the bytes of your model.

- **Exact**: the new global weight equals the weighted mean of the clients' weights, to rounding.
- **Ranks**: you can give clients different ranks (`federation.ranks`).
- **Sums**: the server needs only a sum of the replies, so you can use secure aggregation and robust means.
- **Personal**: each client ends with its own model.
"""
PAGE = """# {name}

{idea}

{body}

## When to use it

{when}

## Traffic and cost

{traffic}

## Options

```yaml
{config}
```
{options}
## Deviations

{deviations}

## Reference

{citation}
"""


def split_docstring(cls: type[Any]) -> tuple[str, str, str, str]:
    """Idea, citation, explanation with equations, and deviations, from the docstring of a class's module."""
    text = re.sub(r"``(.+?)``", r"`\1`", inspect.getdoc(inspect.getmodule(cls)) or "", flags=re.DOTALL)
    explained, _, deviations = text.partition("\n\nDeviations")
    first, *parts = explained.split("\n\n")
    idea = " ".join(first.partition(": ")[2].split())
    citation = "" if parts[0].startswith(" ") else parts.pop(0)
    deviations = deviations.removeprefix(": ")
    return idea[0].upper() + idea[1:], citation, "\n\n".join(parts), deviations[:1].upper() + deviations[1:]


def read_measured() -> dict[str, str]:
    """Read a sentence on each method from the tables of the benchmark's page."""
    found: dict[str, list[str]] = {}
    page = (DOCS / "benchmark.md").read_text(encoding="utf-8")
    for section in page.split("\n## "):
        rows = [re.split(r" *\| *", line)[1:-1] for line in section.splitlines() if re.match(r"\| [a-z]", line)]
        if rows and rows[0][0] == "method":
            reference = rows[1]
            for name, _, score, _, size, *_ in rows[1:]:
                than = "" if name == reference[0] else f" (FedIT {reference[2].split()[0]})"
                found.setdefault(name, []).append(f"{score.split()[0]} %{than}, {size} MB")
    return {name: f"[Benchmark](../benchmark.md): {'; '.join(cells)}." for name, cells in found.items()}


def format_options(options: list[Option]) -> str:
    """A list of options, none if there are no options."""
    rows = [f"- `{option.name}` ({option.default}): {option.help.replace('``', '`')}" for option in options]
    return "\n".join(["", *rows]) + "\n" if rows else ""


def format_page(row: MethodRow | WrapperRow) -> str:
    """The page of a method or wrapper."""
    facts = FACTS[row.key]
    idea, citation, body, deviations = split_docstring((METHODS | WRAPPERS)[row.key])
    options = [option for option in row.options if option.name not in COMMON]
    values = {"name": row.key, **{option.name: option.default for option in options}}
    if isinstance(row, MethodRow):
        stores = facts.get("stores")
        traffic = f"Elements per layer: {facts['up']} up; {facts['down']} down."
        traffic += f" A client stores {stores}." if stores else ""
        config: dict[str, Any] = {"method": values}
        if row.heterogeneous_ranks and row.key != "local-only":
            config["federation"] = {"ranks": [8, 4]}
    else:
        traffic = f"{facts['traffic'][0].upper()}{facts['traffic'][1:]}."
        config = {"method": {"name": "fedit", "wrappers": [values]}}
    shown = facts.get("config") or yaml.safe_dump(config, sort_keys=False, default_flow_style=None, width=110)
    return PAGE.format(
        name=row.name,
        idea=idea,
        body=body,
        when=facts["when"],
        traffic=" ".join(part for part in (traffic, facts.get("cost"), MEASURED.get(row.key)) if part),
        config=shown.strip(),
        options=format_options(options),
        deviations=deviations or "None.",
        citation=citation or f"{row.paper[0].upper()}{row.paper[1:]}.",
    )


def format_tables() -> str:
    """The page with a row for each method and wrapper."""
    lines = [INTRO, "## Methods", ""]
    lines += ["| key | exact | ranks | sums | personal | up | down |", "|---|---|---|---|---|---|---|"]
    for row in list_methods():
        claims = (row.exact, row.heterogeneous_ranks, row.reduction == "sum", row.personal)
        cells = ["yes" if claim else "no" for claim in claims]
        facts = FACTS[row.key]
        lines.append(f"| [`{row.key}`](methods/{row.key}.md) | {' | '.join(cells)} | {facts['up']} | {facts['down']} |")
    lines += ["", "## Wrappers", "", "| key | effect | traffic |", "|---|---|---|"]
    for row in list_wrappers():
        lines.append(f"| [`{row.key}`](methods/{row.key}.md) | {row.idea} | {FACTS[row.key]['traffic']} |")
    return "\n".join(lines) + "\n"


MEASURED = read_measured()


def list_pages() -> dict[Path, str]:
    """All pages, by path."""
    pages = {DOCS / "methods" / f"{row.key}.md": format_page(row) for row in (*list_methods(), *list_wrappers())}
    return pages | {TABLES: format_tables()}


if __name__ == "__main__":
    for path, text in list_pages().items():
        path.write_text(text, encoding="utf-8")
