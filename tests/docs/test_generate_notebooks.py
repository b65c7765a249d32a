"""The notebooks: they have the code of their sources, and run from the first cell to the last."""

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest

from helpers.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return load_script("docs/generate_notebooks.py")


def test_the_notebooks_are_current(generator: ModuleType) -> None:
    for path, text in generator.build_notebooks().items():
        assert (ROOT / path).read_text(encoding="utf-8") == text, "run docs/generate_notebooks.py"


def test_every_notebook_shows_what_it_prints_and_plots(generator: ModuleType) -> None:
    for path in generator.PAGES:
        cells = nbformat.read(ROOT / path, as_version=4).cells
        outputs = [output for cell in cells for output in cell.get("outputs", ())]
        assert outputs, f"run docs/generate_notebooks.py --run {path}"
        assert any("image/png" in output.get("data", ()) for output in outputs), path
        assert not any(output.get("name") == "stderr" or output.output_type == "error" for output in outputs), path
        assert not re.search(r"/(tmp|home|root|var)/", str(outputs)), path


def run_notebook(generator: ModuleType, path: Path, folder: Path, **settings: Any) -> str:
    """Run a copy of a notebook in a folder, with other settings in its cell of parameters; returns what it printed."""
    notebook = nbformat.read(ROOT / path, as_version=4)
    generator.run_cells(notebook, folder, **settings)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output["text"] for output in outputs if output["output_type"] == "stream")


@pytest.mark.slow
def test_one_round_step_by_step(generator: ModuleType, tmp_path: Path) -> None:
    assert "'round': 1" in run_notebook(generator, Path("docs/tour.ipynb"), tmp_path)
    assert (tmp_path / "runs" / "tour" / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_an_own_method(generator: ModuleType, tiny_folder: Path, tmp_path: Path) -> None:
    settings = {"model": str(tiny_folder / "deep-bert"), "layer": 1, "rounds": 1, "examples": 120}
    printed = run_notebook(generator, Path("examples/own_method.ipynb"), tmp_path, **settings)
    assert "slow-a: held-out accuracy " in printed
    assert len(re.findall(r"^slow-a: \d\.\d{3}, \d\.\d{3}$", printed, re.MULTILINE)) == 1
    assert (tmp_path / "runs" / "own_method" / "slow-a-seed0").is_dir()


@pytest.mark.slow
def test_an_own_trainer(generator: ModuleType, decoders: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="the extra fedspan[trl] is not installed")
    settings = {"model": str(decoders / "llama-lm"), "texts": 16, "rounds": 2}
    printed = run_notebook(generator, Path("examples/own_trainer.ipynb"), tmp_path, **settings)
    assert "on held-out letters" in printed
    assert (tmp_path / "runs" / "own_trainer" / "run" / "adapter").is_dir()


@pytest.mark.slow
def test_instruction_tuning(generator: ModuleType, decoders: Path, tmp_path: Path) -> None:
    settings = {"model": str(decoders / "llama-lm"), "each": 10, "rounds": 1}
    printed = run_notebook(generator, Path("examples/instruction_tuning.ipynb"), tmp_path, **settings)
    assert "round 1: held-out loss " in printed
    assert (tmp_path / "runs" / "instruction_tuning" / "run" / "adapter").is_dir()


@pytest.mark.slow
def test_three_machines(generator: ModuleType, tiny_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="the extra fedspan[deploy] is not installed")
    settings = {"model": str(tiny_folder / "deep-bert"), "layer": 1, "rounds": 1, "texts": 360}
    printed = run_notebook(generator, Path("examples/three_machines.ipynb"), tmp_path, **settings)
    assert printed.count(" on its own test part") == 3
    assert (tmp_path / "runs" / "three_machines" / "run" / "adapter").is_dir()
