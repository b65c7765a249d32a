"""The notebooks: they have the code of their sources, and run from the first cell to the last."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_notebooks", ROOT / "docs" / "generate_notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_notebooks_are_current(generator: ModuleType) -> None:
    for path, text in generator.build_notebooks().items():
        assert (ROOT / path).read_text(encoding="utf-8") == text, "run docs/generate_notebooks.py"


def test_a_cell_has_the_definitions_of_a_script(generator: ModuleType) -> None:
    before, settings, code, after = generator.convert_page(
        "# Title\n\n```python parameters\nrounds = 1\n```\n\n"
        "```python three_machines.py\nOWNERS\nrun_command\n```\n\nThe end.\n"
    )
    assert (before.source, settings.source, after.source) == ("# Title", "rounds = 1", "The end.")
    assert settings.metadata["tags"] == [generator.PARAMETERS]
    constant, function = code.source.split("\n\n\n")
    assert constant.startswith("OWNERS = (")
    assert function.startswith("@contextmanager\ndef run_command(")
    assert function in (ROOT / "examples" / "three_machines.py").read_text(encoding="utf-8")


def test_every_cell_of_a_tutorial_has_an_explanation_nearby(generator: ModuleType) -> None:
    """No notebook is a script in cells: of its cells, a third or more are text, and it reads no command line."""
    for path in generator.PAGES:
        cells = nbformat.read(ROOT / path, as_version=4).cells
        assert 3 * sum(cell.cell_type == "markdown" for cell in cells) >= len(cells), path
        assert not any("argparse" in cell.source or "sys.argv" in cell.source for cell in cells), path


def run_notebook(path: Path, folder: Path, **settings: Any) -> str:
    """Run a copy of a notebook in a folder, with other settings in its cell of parameters; returns what it printed."""
    notebook = nbformat.read(ROOT / path, as_version=4)
    for cell in notebook.cells:
        if settings and "parameters" in cell.metadata.get("tags", ()):
            assert {line.split(" = ")[0] for line in cell.source.splitlines()} >= settings.keys()
            cell.source += "".join(f"\n{name} = {value!r}" for name, value in settings.items())
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output["text"] for output in outputs if output["output_type"] == "stream")


@pytest.mark.slow
def test_one_round_step_by_step(tmp_path: Path) -> None:
    assert "'round': 1" in run_notebook(Path("docs/tour.ipynb"), tmp_path)
    assert (tmp_path / "runs" / "tour" / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_an_own_method(tiny_folder: Path, tmp_path: Path) -> None:
    settings = {"model": str(tiny_folder / "bert"), "layer": 1, "rounds": 1, "examples": 120}
    printed = run_notebook(Path("examples/own_method.ipynb"), tmp_path, **settings)
    assert "slow-a: held-out accuracy " in printed
    assert (tmp_path / "runs" / "own_method" / "slow-a-seed0").is_dir()


@pytest.mark.slow
def test_an_own_trainer(decoders: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="the extra fedspan[trl] is not installed")
    settings = {"model": str(decoders / "llama-lm"), "texts": 16, "rounds": 2}
    printed = run_notebook(Path("examples/own_trainer.ipynb"), tmp_path, **settings)
    assert "on held-out letters" in printed
    assert (tmp_path / "runs" / "own_trainer" / "run" / "adapter").is_dir()


@pytest.mark.slow
def test_instruction_tuning(decoders: Path, tmp_path: Path) -> None:
    settings = {"model": str(decoders / "llama-lm"), "each": 10, "rounds": 1}
    printed = run_notebook(Path("examples/instruction_tuning.ipynb"), tmp_path, **settings)
    assert "round 1: held-out loss " in printed
    assert (tmp_path / "runs" / "instruction_tuning" / "run" / "adapter").is_dir()


@pytest.mark.slow
def test_three_machines(tiny_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="the extra fedspan[flower] is not installed")
    settings = {"model": str(tiny_folder / "bert"), "layer": 1, "rounds": 1, "texts": 360}
    printed = run_notebook(Path("examples/three_machines.ipynb"), tmp_path, **settings)
    assert printed.count(" on its own test part") == 3
    assert (tmp_path / "runs" / "three_machines" / "run" / "adapter").is_dir()
