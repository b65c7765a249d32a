"""Write the notebooks from a page and from examples: ``python docs/generate_notebooks.py``.

Each is beside its source, has the same code, and no outputs.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("docs/tour.md",)
SCRIPTS = (
    "examples/instruction_tuning.py",
    "examples/own_method.py",
    "examples/own_trainer.py",
    "examples/three_machines.py",
)
PARAMETERS = "parameters"
"""Tag of the cell with a script's options, as papermill names it."""
_FENCE = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def convert_page(text: str) -> list[Any]:
    """Return a page's cells: its Python blocks, and the text between them."""
    parts = _FENCE.split(text)
    return [
        (new_code_cell if at % 2 else new_markdown_cell)(part.strip()) for at, part in enumerate(parts) if part.strip()
    ]


def convert_script(text: str, name: str) -> list[Any]:
    """Return a script's cells: its docstring as text, imports and constants by paragraph, each class and function.

    The first paragraph of a class's or function's docstring is a text above its cell.
    The call of ``main`` at the end reads the options from a cell, because a notebook has no command line.

    Args:
        text: The script.
        name: Its file name.
    """
    module, lines = ast.parse(text), text.splitlines()
    cells = [new_markdown_cell(f"# {ast.get_docstring(module)}")]
    start = module.body[0].end_lineno or 0
    for node, end in _list_ends(module.body[1:-1], lines):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and (described := ast.get_docstring(node)):
            summary, _, _ = described.partition("\n\n")
            cells.append(new_markdown_cell(f"`{node.name}`: {summary}"))
        cells.append(new_code_cell("\n".join(lines[start:end]).strip()))
        start = end
    cells.append(new_markdown_cell("Run it. `options` has the arguments of the script's command line."))
    cells.append(new_code_cell('options = []  # those of the script: ["--smoke"] takes seconds, ["--help"] lists them'))
    cells[-1].metadata["tags"] = [PARAMETERS]
    cells.append(new_code_cell(f'import sys\n\nsys.argv = ["{name}", *options]\nmain()'))
    return cells


def _list_ends(nodes: list[ast.stmt], lines: list[str]) -> list[tuple[ast.stmt, int]]:
    """Return the last statements of the cells with their last lines: a class or function, or what precedes one."""
    ends: list[tuple[ast.stmt, int]] = []
    for at, node in enumerate(nodes):
        following = nodes[at + 1] if at + 1 < len(nodes) else None
        is_definition = isinstance(node, ast.ClassDef | ast.FunctionDef)
        if is_definition or following is None or isinstance(following, ast.ClassDef | ast.FunctionDef):
            ends.append((node, node.end_lineno or len(lines)))
    return ends


def build_notebooks() -> dict[Path, str]:
    """Return the notebooks as JSON, by their paths in the repository."""
    notebooks: dict[Path, str] = {}
    for source in (*PAGES, *SCRIPTS):
        path = Path(source)
        text = (ROOT / path).read_text(encoding="utf-8")
        cells = convert_page(text) if source in PAGES else convert_script(text, path.name)
        cells.insert(0, new_markdown_cell(f"This notebook is [{path.name}]({path.name}), cell by cell."))
        for number, cell in enumerate(cells):
            cell["id"] = f"cell-{number}"  # nbformat's own are random
        kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
        notebook = new_notebook(cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})
        nbformat.validate(notebook)
        notebooks[path.with_suffix(".ipynb")] = nbformat.writes(notebook) + "\n"
    return notebooks


def main() -> None:
    """Write the notebooks."""
    for path, text in build_notebooks().items():
        (ROOT / path).write_text(text, encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
