"""benchmarks/reported_losses.py: what a run stores, and the rounds that are selected by exact and by rounded losses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fedspan.config import RunConfig
from helpers import tiny

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmark_(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import reported_losses

    return reported_losses


def make_config(folder: Path, rounds: int) -> RunConfig:
    """Three clients with 18 validation examples each."""
    partition = {"partitioner": "iid", "clients": 3, "column": None, "validation": 0.5}
    federation = {"rounds": rounds, "early_stopping": 4, "clients_per_round": None}
    model, evaluation = {"head_init": "auto"}, {"best_by": "loss"}
    return tiny.config(folder, model=model, partition=partition, federation=federation, evaluation=evaluation)


def test_a_rule_decides_by_what_nodes_report(benchmark_: ModuleType, tiny_folder: Path) -> None:
    """Losses fall slowly and then rise; with 20 examples, the step is 2 ln 2 * 10 / 40 = 0.35, or half of it."""
    means = [0.66, 0.65, 0.64, 0.63, 0.62, 0.60, 0.58, 0.57, 0.56, 0.66, 0.66, 0.66, 0.66, 0.9, 0.9, 0.9, 0.9, 0.9]
    losses = [{f"c{client}": [mean] * 20 for client in range(5)} for mean in means]
    config = make_config(tiny_folder, 17)
    outcomes = {rule.name: benchmark_.replay(losses, rule, 2, config) for rule in benchmark_.RULES}
    assert outcomes == {
        "exact": (8, 12),
        "bounded": (8, 12),
        "rounded": (12, 16),
        "rounded, equal ones stall": (4, 4),
        "half the bound": (8, 12),
        "half the bound, equal ones stall": (4, 4),
    }


@pytest.mark.slow
def test_the_page_has_the_test_accuracies_of_the_rounds(
    benchmark_: ModuleType, monkeypatch: pytest.MonkeyPatch, tiny_folder: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(benchmark_, "get_config", lambda *_: make_config(tiny_folder, 2))
    monkeypatch.setattr(benchmark_, "SUBSETS", (subset := benchmark_.Subset("SST-2", 1800, 4),))
    page = tmp_path / "page.md"
    words = ["--data", "data", "--work", str(tmp_path), "--seeds", "0", "--page", str(page)]
    monkeypatch.setattr(sys, "argv", ["reported_losses.py", *words])
    benchmark_.main()
    folder = subset.folder(0, tmp_path)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    stored = benchmark_.read_rounds(folder.with_suffix(".jsonl"))
    for row, line in zip(rows, stored, strict=True):
        losses = [loss for own in line["losses"].values() for loss in own]
        assert row["validation"]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    together, section = page.read_text().split("\n## ")
    assert "test accuracy, % (1 of 1 runs)" in together
    assert section.startswith("SST-2, 1,800 training examples\n\n18 validation examples of each client;")
    assert f"| *all rounds* | {100 * rows[-1]['test']['accuracy']:.1f} | 2 | 2 |" in section
