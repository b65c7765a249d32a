"""GaLore-AdamW against the package ``galore-torch``, where it is installed: what ``benchmarks/galore.py`` compares."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "galore.py"


@pytest.mark.parametrize(
    ("period", "scale", "bias_correction"), [(1000, 1.0, False), (1000, 0.25, True), (3, 1.0, True), (3, 0.25, False)]
)
def test_galore_torch_takes_the_same_steps(
    period: int, scale: float, bias_correction: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("galore_torch", reason="needs `pip install --no-deps galore-torch`", exc_type=ImportError)
    if not SCRIPT.exists():
        pytest.skip("the source distribution has no benchmarks")
    spec = importlib.util.spec_from_file_location("benchmark_galore", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "benchmark_galore", benchmark)
    spec.loader.exec_module(benchmark)
    for steps in (1, 2, 7):
        assert benchmark.compute_distance(steps, period, scale, bias_correction) < 1e-6
