"""benchmarks/gpu.py on tiny shapes on the CPU: every part runs, nothing is judged; without a GPU the page says so."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_benchmark", ROOT / "benchmarks" / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their annotations up there
    spec.loader.exec_module(module)
    return module


def page(script: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments, "--page", str(folder / "gpu.md")])
    script.main()
    return (folder / "gpu.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_part_is_measured(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page(script, tmp_path, monkeypatch, "--smoke", "--device", "cpu", "--batches", "1", "--clients", "1", "2")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| tiny")]
    assert [row[0] for row in rows] == ["| tiny RoBERTa", "| tiny Llama"] * 2
    for row in rows[:2]:
        loop, one, two = (float(cell.replace(",", "")) for cell in row[2:5])
        assert float(row[5]) == pytest.approx(two / loop, rel=0.1, abs=0.06)
        assert one > 0
    assert [row[1] for row in rows[2:]] == ["0.0e+00"] * 2  # the device is the CPU
    assert "| cpu | " in text
    assert "pass |" not in text
    assert "FAIL" not in text


@pytest.mark.slow
def test_time_that_is_over_leaves_cells_open(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = page(script, tmp_path, monkeypatch, "--smoke", "--device", "cpu", "--batches", "1", "--minutes", "0")
    assert "| tiny Llama | 1 | not reached | not reached | not reached |" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_the_page_says_that_nothing_was_measured(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = page(script, tmp_path, monkeypatch)
    assert "Not measured yet" in text
    published = (ROOT / "docs" / "results" / "gpu.md").read_text(encoding="utf-8")
    assert text == published or "Device: " in published
