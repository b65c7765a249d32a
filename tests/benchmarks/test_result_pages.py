"""Pages of results, from reports of finished runs: head updates, reported losses, privacy and compression."""

import json
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import head_updates
import privacy
import pytest
import reported_losses

from fedspan.config import RunConfig, load_config
from helpers import tiny


def finish(folder: Path, exported: float, last: float, loss: float) -> None:
    folder.mkdir(parents=True)
    report = {"start": {"test": {"accuracy": 0.5}}, "scores": {"test": {"accuracy": exported}}}
    (folder / "report.json").write_text(json.dumps(report))
    rows = [{"test": {"accuracy": value}, "validation": {"loss": loss}} for value in (0.1, last)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_differences_are_paired_by_cell(tmp_path: Path) -> None:
    args = Namespace(out=tmp_path)
    assert head_updates.tables(args) == "No cell is finished.\n"
    cells = {("Banking77", 0.3, 0): 0.0, ("Fashion-MNIST", 0.1, 1): 0.2}
    for (name, alpha, seed), level in cells.items():
        for number, way in enumerate(head_updates.WAYS):
            run = head_updates.Run(name, alpha, seed, way)
            gain = 0.01 * number if name == "Banking77" else 0.03 * number
            finish(run.folder(tmp_path), 0.6 + level + gain, 0.7 + level, 0.9 - gain)
    first = next(iter(head_updates.WAYS))
    finish(head_updates.Run("Banking77", 0.1, 0, first).folder(tmp_path), 0.0, 0.0, 9.0)  # the others are missing
    lines = head_updates.tables(args).splitlines()
    assert lines[0] == "2 of 10 cells are finished."
    ways = list(head_updates.WAYS)[1:]
    # differences of 1 and 3 points have the mean 2 and the standard error 1; the second way has twice these
    assert f"| {ways[0]} | -0.020 ± 0.010 | +2.00 ± 1.00 | +0.00 ± 0.00 |" in lines
    assert f"| {ways[1]} | -0.040 ± 0.020 | +4.00 ± 2.00 | +0.00 ± 0.00 |" in lines
    rows = [line for line in lines if line.startswith(("| Banking77", "| Fashion-MNIST"))]
    assert rows[0].startswith("| Banking77 | 0.3 | 50.0 | 60.0 / 70.0 | 61.0 / 70.0 |")
    assert rows[1].startswith("| Fashion-MNIST | 0.1 | 50.0 | 80.0 / 90.0 | 83.0 / 90.0 |")
    assert len(rows) == 2


def test_every_way_differs_from_init_in_how_the_head_trains(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("data: {train: x.csv}\ntraining: {logit_adjustment: 1}\n")
    own = load_config(path)
    for changes in head_updates.WAYS.values():
        made = load_config(path, list(changes))
        differing = {section for section in type(own).model_fields if getattr(own, section) != getattr(made, section)}
        assert differing == {change.partition(".")[0] for change in changes}


def make_config(folder: Path, rounds: int) -> RunConfig:
    """Three clients with 18 validation examples each."""
    partition = {"partitioner": "iid", "clients": 3, "column": None, "validation": 0.5}
    federation = {"rounds": rounds, "early_stopping": 4, "clients_per_round": None}
    model, evaluation = {"head_init": "auto"}, {"best_by": "loss"}
    return tiny.config(folder, model=model, partition=partition, federation=federation, evaluation=evaluation)


def test_a_rule_decides_by_what_nodes_report(tiny_folder: Path) -> None:
    """Losses fall slowly and then rise; the noise of 20 examples is larger than what they fall."""
    means = [0.66, 0.65, 0.64, 0.63, 0.62, 0.60, 0.58, 0.57, 0.56, 0.66, 0.66, 0.66, 0.66, 0.9, 0.9, 0.9, 0.9, 0.9]
    losses = [{f"c{client}": [mean] * 20 for client in range(5)} for mean in means]
    config = make_config(tiny_folder, 17)
    exact, bounded, noisy, _ = reported_losses.RULES
    silent = replace(noisy, epsilon=1e9)
    for rule in (exact, bounded, silent):
        assert reported_losses.replay(losses, rule, 2, config) == (8, 12), rule.name
    assert len({reported_losses.replay(losses, noisy, 2, config) for _ in range(20)}) > 1


@pytest.mark.slow
def test_the_page_has_test_accuracies(monkeypatch: pytest.MonkeyPatch, tiny_folder: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(reported_losses, "get_config", lambda *_: make_config(tiny_folder, 2))
    monkeypatch.setattr(reported_losses, "SUBSETS", (subset := reported_losses.Subset("SST-2", 1800, 4),))
    page = tmp_path / "page.md"
    words = ["--data", "data", "--work", str(tmp_path), "--seeds", "0", "--page", str(page)]
    monkeypatch.setattr(sys, "argv", ["reported_losses.py", *words])
    reported_losses.main()
    folder = subset.folder(0, tmp_path)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    stored = reported_losses.read_rounds(folder.with_suffix(".jsonl"))
    for row, line in zip(rows, stored, strict=True):
        losses = [loss for own in line["losses"].values() for loss in own]
        assert row["validation"]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    together, section = page.read_text().split("\n## ")
    assert "test accuracy, % (1 of 1 runs, 20 draws of noise)" in together
    assert section.startswith("SST-2, 1,800 training examples\n\n18 validation examples of each client;")
    assert f"| *all rounds* | {100 * rows[-1]['test']['accuracy']:.1f} | 2 | 2 |" in section


def test_the_page_of_two_tasks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Finished runs are read, the rate is that of the best validation accuracy, and ends of the grid are marked."""
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
