"""benchmarks/head_updates.py: paired differences over the cells in which every way of training is finished."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest

import fedspan
from fedspan.config import RunConfig, load_config

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark_(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import head_updates

    return head_updates


def finish(folder: Path, exported: float, last: float, loss: float) -> None:
    """Write what a finished run leaves."""
    folder.mkdir(parents=True)
    report = {"start": {"test": {"accuracy": 0.5}}, "scores": {"test": {"accuracy": exported}}}
    (folder / "report.json").write_text(json.dumps(report))
    rows = [{"test": {"accuracy": value}, "validation": {"loss": loss}} for value in (0.1, last)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_differences_are_paired_by_cell(benchmark_: ModuleType, tmp_path: Path) -> None:
    args = Namespace(out=tmp_path)
    assert benchmark_.tables(args) == "No cell is finished.\n"
    cells = {("Banking77", 0.3, 0): 0.0, ("Fashion-MNIST", 0.1, 1): 0.2}
    for (name, alpha, seed), level in cells.items():
        for number, way in enumerate(benchmark_.WAYS):
            run = benchmark_.Run(name, alpha, seed, way)
            gain = 0.01 * number if name == "Banking77" else 0.03 * number
            finish(run.folder(tmp_path), 0.6 + level + gain, 0.7 + level, 0.9 - gain)
    first = next(iter(benchmark_.WAYS))
    finish(benchmark_.Run("Banking77", 0.1, 0, first).folder(tmp_path), 0.0, 0.0, 9.0)  # the others are missing
    lines = benchmark_.tables(args).splitlines()
    assert lines[0] == "2 of 10 cells are finished."
    ways = list(benchmark_.WAYS)[1:]
    # differences of 1 and 3 points have the mean 2 and the standard error 1; the second way has twice these
    assert f"| {ways[0]} | -0.020 ± 0.010 | +2.00 ± 1.00 | +0.00 ± 0.00 |" in lines
    assert f"| {ways[1]} | -0.040 ± 0.020 | +4.00 ± 2.00 | +0.00 ± 0.00 |" in lines
    rows = [line for line in lines if line.startswith(("| Banking77", "| Fashion-MNIST"))]
    assert rows[0].startswith("| Banking77 | 0.3 | 50.0 | 60.0 / 70.0 | 61.0 / 70.0 |")
    assert rows[1].startswith("| Fashion-MNIST | 0.1 | 50.0 | 80.0 / 90.0 | 83.0 / 90.0 |")
    assert len(rows) == 2


def test_every_way_differs_from_init_in_how_the_head_trains(benchmark_: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("data: {train: x.csv}\ntraining: {logit_adjustment: 1}\n")
    own = load_config(path)
    for changes in benchmark_.WAYS.values():
        made = load_config(path, list(changes))
        differing = {section for section in type(own).model_fields if getattr(own, section) != getattr(made, section)}
        assert differing == {change.partition(".")[0] for change in changes}


def test_the_command_trains_every_way_on_a_subset_of_the_defaults(
    benchmark_: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, configs = "Banking77", list[RunConfig]()
    folder = tmp_path / "data" / "banking77"
    folder.mkdir(parents=True)
    for part in ("train", "test"):
        lines = [f"{part} query {number},intent-{number % 20:02}" for number in range(2000)]
        (folder / f"{part}.csv").write_text("\n".join(["text,category", *lines]) + "\n")
    monkeypatch.setattr(fedspan, "run", lambda config, *_, **__: configs.append(config))
    options = {"--data": tmp_path / "data", "--models": tmp_path, "--out": tmp_path / "out", "--only": name}
    monkeypatch.setattr(sys, "argv", ["head_updates.py", *(str(part) for pair in options.items() for part in pair)])
    benchmark_.main()
    assert [config.partition.alpha for config in configs] == [0.3] * 5 + [0.1] * 5
    assert len(Path(str(configs[0].data.train)).read_text().splitlines()) == 1 + benchmark_.SETS[name].train
