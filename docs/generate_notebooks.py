"""Write the notebooks from pages: ``python docs/generate_notebooks.py``.

A page's text becomes cells of text, and its blocks of Python become cells of code. A block ``python own_method.py``
lists definitions of that script, which become the cell, so that no code is written twice. The block ``python
parameters`` has the settings of the notebook. Notebooks are stored without outputs.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
PAGES = {
    "docs/tour.ipynb": "docs/tour.md",
    **{
        f"examples/{name}.ipynb": f"examples/tutorials/{name}.md"
        for name in ("instruction_tuning", "own_method", "own_trainer", "three_machines")
    },
}
"""Sources of the notebooks, by notebook."""
PARAMETERS = "parameters"
"""Tag of the cell with the settings, as papermill names it."""
_FENCE = re.compile(r"^```python(?: (\S+))?\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def convert_page(text: str) -> list[Any]:
    """Return a page's cells: its Python blocks, and the text between them."""
    cells: list[Any] = []
    first, *parts = _FENCE.split(text)
    texts, infos, blocks = [first, *parts[2::3]], [*(info or "" for info in parts[0::3]), ""], [*parts[1::3], ""]
    for prose, info, block in zip(texts, infos, blocks, strict=True):
        if prose.strip():
            cells.append(new_markdown_cell(prose.strip()))
        if block:
            is_listing = info.endswith(".py")
            cells.append(new_code_cell(_read_definitions(info, block.split()) if is_listing else block.strip()))
        if info == PARAMETERS:
            cells[-1].metadata["tags"] = [PARAMETERS]
    return cells


def _read_definitions(script: str, names: list[str]) -> str:
    """Return the source of a script's classes, functions and constants, in the given order."""
    text = (EXAMPLES / script).read_text(encoding="utf-8")
    lines, sources = text.splitlines(), dict[str, str]()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            sources[node.name] = "\n".join(lines[start - 1 : node.end_lineno])
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            sources[node.targets[0].id] = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    text = ""
    for name in names:
        gap = "\n\n\n" if sources[name].startswith(("def ", "class ", "@")) else "\n"
        text += gap + sources[name]
    return text.strip()


def build_notebooks() -> dict[Path, str]:
    """Return the notebooks as JSON, by their paths in the repository."""
    notebooks: dict[Path, str] = {}
    for notebook_path, source in PAGES.items():
        path = Path(notebook_path)
        cells = convert_page((ROOT / source).read_text(encoding="utf-8"))
        for number, cell in enumerate(cells):
            cell["id"] = f"cell-{number}"  # nbformat's own are random
        kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
        notebook = new_notebook(cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})
        nbformat.validate(notebook)
        notebooks[path] = nbformat.writes(notebook) + "\n"
    return notebooks


def main() -> None:
    """Write the notebooks."""
    for path, text in build_notebooks().items():
        (ROOT / path).write_text(text, encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
