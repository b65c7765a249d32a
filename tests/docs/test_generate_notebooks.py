"""The notebooks: they have the code of their sources, and run from the first cell to the last."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

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


def test_a_script_s_cells_have_all_of_its_code(generator: ModuleType) -> None:
    for source in generator.SCRIPTS:
        text = (ROOT / source).read_text(encoding="utf-8")
        *cells, options, call = generator.convert_script(text, Path(source).name)
        assert options.metadata["tags"] == [generator.PARAMETERS]
        assert call.source.endswith("main()")
        code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
        body = text.split('"""', 2)[2].partition('\nif __name__ == "__main__":')[0]
        assert code.split() == body.split()


def run_notebook(path: Path, folder: Path, options: list[str] | None = None) -> str:
    """Run a copy of a notebook in a folder, with a script's options if given; returns what it printed."""
    notebook = nbformat.read(ROOT / path, as_version=4)
    for cell in notebook.cells:
        if options is not None and "parameters" in cell.metadata.get("tags", ()):
            cell.source = f"options = {options!r}"
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output["text"] for output in outputs if output["output_type"] == "stream")


@pytest.mark.slow
def test_one_round_step_by_step(tmp_path: Path) -> None:
    assert "'round': 1" in run_notebook(Path("docs/tour.ipynb"), tmp_path)
    assert (tmp_path / "runs" / "tour" / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_an_own_method(tiny_folder: Path, tmp_path: Path) -> None:
    options = ["--smoke", "--layer", "1", "--model", str(tiny_folder / "bert")]
    printed = run_notebook(Path("examples/own_method.ipynb"), tmp_path, options)
    assert "slow-a: held-out accuracy " in printed
    assert (tmp_path / "runs" / "own_method-smoke" / "slow-a-seed0").is_dir()


@pytest.mark.slow
def test_an_own_trainer(decoders: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="the extra fedspan[trl] is not installed")
    options = ["--smoke", "--model", str(decoders / "llama-lm")]
    shutil.copy(ROOT / "examples" / "own_trainer.yaml", tmp_path)  # as beside the notebook
    printed = run_notebook(Path("examples/own_trainer.ipynb"), tmp_path, options)
    assert "on held-out letters" in printed
    assert (tmp_path / "runs" / "own_trainer-smoke" / "run" / "adapter").is_dir()


@pytest.mark.slow
def test_instruction_tuning(decoders: Path, tmp_path: Path) -> None:
    options = ["--smoke", "--model", str(decoders / "llama-lm")]
    printed = run_notebook(Path("examples/instruction_tuning.ipynb"), tmp_path, options)
    assert "round 1: held-out loss " in printed
    assert (tmp_path / "runs" / "instruction_tuning-smoke" / "run" / "adapter").is_dir()


@pytest.mark.slow
def test_three_machines(tiny_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="the extra fedspan[flower] is not installed")
    options = ["--smoke", "--layer", "1", "--model", str(tiny_folder / "bert")]
    printed = run_notebook(Path("examples/three_machines.ipynb"), tmp_path, options)
    assert printed.count(" on its own test part") == 3
    assert (tmp_path / "runs" / "three_machines-smoke" / "run" / "adapter").is_dir()
