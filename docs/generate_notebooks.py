"""Write the notebooks from pages: ``python docs/generate_notebooks.py``.

A page's text becomes cells of text, and its blocks of Python become cells of code. A block ``python own_method.py``
lists definitions of that script, which become the cell, so that no code is written twice. The block ``python
parameters`` has the settings of the notebook.

``--run docs/tour.ipynb`` runs a notebook from its first cell to its last and stores what the cells print and plot;
``--model FOLDER`` is a copy of the model that its settings name, for machines that cannot reach the hub. Outputs stay
until the code of the notebook changes.
"""

from __future__ import annotations

import argparse
import ast
import os
import platform
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

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
        _keep_outputs(ROOT / path, cells)
        kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
        notebook = new_notebook(cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})
        nbformat.validate(notebook)
        notebooks[path] = nbformat.writes(notebook) + "\n"
    return notebooks


def _get_code(cells: list[Any]) -> list[Any]:
    return [cell for cell in cells if cell.cell_type == "code"]


def _keep_outputs(path: Path, cells: list[Any]) -> None:
    """Copy the outputs of a stored notebook, if its code is still that of the cells."""
    stored = _get_code(nbformat.read(path, as_version=4).cells) if path.exists() else []
    code = _get_code(cells)
    if [cell.source for cell in stored] == [cell.source for cell in code]:
        for cell, old in zip(code, stored, strict=True):
            cell.outputs, cell.execution_count = old.outputs, old.execution_count


def run_cells(notebook: Any, folder: Path, **settings: Any) -> None:
    """Run a notebook, whose cells get their outputs.

    Args:
        notebook: The notebook.
        folder: Folder in which it runs.
        settings: Further settings, set at the end of the cell of parameters while it runs.

    Raises:
        KeyError: If that cell does not have a setting.
    """
    sources = [cell.source for cell in notebook.cells]
    for cell in notebook.cells:
        if settings and PARAMETERS in cell.metadata.get("tags", ()):
            if unknown := settings.keys() - {line.split(" = ")[0] for line in cell.source.splitlines()}:
                raise KeyError(*unknown)
            cell.source += "".join(f"\n{name} = {value!r}" for name, value in settings.items())
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=900, record_timing=False, coalesce_streams=True, resources=resources)
    client.execute()
    for cell, source in zip(notebook.cells, sources, strict=True):
        cell.source = source


def _clean(output: Any, folder: str) -> Any:
    if output.output_type != "stream":
        return output
    output.text = re.sub(r"\x1b\[[0-9;]*m", "", output.text.replace(folder, ""))
    output.text = re.sub(r"--port \d+", "--port PORT", output.text)
    return output


def store_outputs(path: Path, **settings: str) -> None:
    """Run a stored notebook in a temporary folder and store what its cells print and plot.

    Left out are standard error and the temporary folder's path; ports, which are random, are ``PORT``. Below the cell
    of parameters, or else the first cell of code, stand machine and date, and other settings than the notebook's own,
    paths by their last part.
    """
    notebook = nbformat.read(ROOT / path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        run_cells(notebook, Path(folder), **settings)
    code = _get_code(notebook.cells)
    for cell in code:
        shown = [part for part in cell.outputs if part.get("name") == "stdout" or "image/png" in part.get("data", ())]
        cell.outputs = [_clean(output, f"{folder}/") for output in shown]
    changed = "".join(f", {name} = {Path(value).name!r}" for name, value in settings.items())
    text = (
        f"Outputs of {time.strftime('%Y-%m-%d')}, {platform.machine()}, {os.cpu_count()} cores{changed} "
        f"(python docs/generate_notebooks.py --run {path})\n"
    )
    first = next((cell for cell in code if PARAMETERS in cell.metadata.get("tags", ())), code[0])
    first.outputs.insert(0, new_output("stream", name="stdout", text=text))
    notebook.metadata.language_info = {"name": "python"}  # as generated; the kernel adds its version
    (ROOT / path).write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


def main() -> None:
    """Write the notebooks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="+", choices=PAGES, default=[], metavar="NOTEBOOK", help="store its outputs")
    parser.add_argument("--model", type=Path, help="folder with the model that the notebooks' settings name")
    args = parser.parse_args()
    for path, text in build_notebooks().items():
        (ROOT / path).write_text(text, encoding="utf-8")
        print(f"wrote {path}")
    for name in args.run:
        store_outputs(Path(name), **({} if args.model is None else {"model": str(args.model.resolve())}))
        print(f"ran {name}")


if __name__ == "__main__":
    main()
