"""The page of methods under differential privacy, from the reports of finished runs."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_the_page_of_two_tasks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Finished runs are read, the rate is that of the best validation accuracy, and ends of the grid are marked."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    privacy = importlib.import_module("privacy")
    validation = {"sst2": {0.002: 0.5, 0.008: 0.7, 0.032: 0.6}, "banking77": {0.002: 0.5, 0.008: 0.5, 0.032: 0.4}}
    for task, by_rate in validation.items():
        for method in ("rolora", "fedask"):
            for lr, accuracy in by_rate.items():
                folder = tmp_path / f"{task}-{method}-epsilon8-lr{lr:g}-seed0"
                folder.mkdir()
                scores = {"validation": {"accuracy": accuracy}, "test": {"accuracy": accuracy - 0.1}}
                report = {"scores": scores, "bytes": {"up": 1_000_000, "down": 2_500_000}}
                (folder / "report.json").write_text(json.dumps(report), encoding="utf-8")
    page = tmp_path / "privacy.md"
    words = ["--task", "sst2", "banking77", "--data", "glue/SST-2", "banking77", "--epsilons", "8", "--rates", "0.002"]
    words += ["0.008", "0.032", "--methods", "rolora", "fedask", "--work", str(tmp_path), "--page", str(page)]
    monkeypatch.setattr(sys, "argv", ["privacy.py", *words])
    privacy.main()
    first, second = page.read_text(encoding="utf-8").split("\n## ")[1:]
    assert first.startswith("SST-2\n\n10 rounds; 20,000 examples, validation and the clients' tests included.\n")
    assert "| rolora | 60.0 (0.008) | 3.50 |" in first
    assert second.startswith("Banking77's first 20 intents\n\n20 rounds.\n")
    assert "| fedask | 40.0 (0.002 ↓) | 3.50 |" in second
