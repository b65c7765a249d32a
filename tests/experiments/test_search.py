"""A search for settings: what is drawn and tried, that validation alone decides, and what comes out."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import fedspan
from fedspan import SweepReport, load_config
from fedspan.experiments import execution
from fedspan.experiments.search import Range, list_combinations, parse_space, plan_sweep, rank_trials
from fedspan.runs.integrity import read_config
from fedspan.runs.report import read_report
from helpers import tiny
from helpers.listeners import RecordingWatcher
from helpers.refusals import refused


def values_of(folder: Path, **changes: Any) -> dict[str, Any]:
    """Values of a config of three rounds with a baseline, unless they are changed."""
    values = tiny.settings(folder, **{"federation": {"rounds": 3}, "partition": {"validation": 0.3}, **changes})
    return {**values, "baselines": ["local-only"]}


def test_a_grid_has_all_combinations(tiny_folder: Path) -> None:
    over = {"training.lr": "1e-3,2e-2", "method.r": [1, 2, 3]}
    plan = plan_sweep(values_of(tiny_folder), over, None, None, [8, 9])
    assert list(plan.values) == [{"training.lr": lr, "method.r": r} for lr in ("1e-3", "2e-2") for r in (1, 2, 3)]
    assert [step.group for step in plan.steps] == [str(number) for number in range(1, 7) for _ in (8, 9)]
    configs = [step.config for step in plan.steps if step.seed == 9]
    assert [(one.training.lr, one.method.options["r"]) for one in configs] == [
        (lr, r) for lr in (0.001, 0.02) for r in (1, 2, 3)
    ]
    assert {one.federation.rounds for one in configs} == {3}
    assert configs[3].method.options == {"r": 1, "lora_alpha": 4}


def test_rounds_that_are_tried_are_those_of_the_trial(tiny_folder: Path) -> None:
    """Final rounds train on the examples that select a trial, so only the config that is found has them."""
    values = values_of(tiny_folder, federation={"rounds": 3, "final_rounds": 2})
    plan = plan_sweep(values, {"federation.rounds": "1,2"}, None, 7, [0])
    assert [step.config.federation.final_rounds for step in plan.steps] == [0, 0]
    assert [config.federation.final_rounds for config in plan.configs] == [2, 2]
    assert [step.config.federation.rounds for step in plan.steps] == [1, 2]
    assert [config.federation.rounds for config in plan.configs] == [1, 2]


def test_an_option_of_a_wrapper_can_be_swept(tiny_folder: Path) -> None:
    values = values_of(tiny_folder)
    values["method"] = {**values["method"], "wrappers": [{"name": "fedprox"}]}
    plan = plan_sweep(values, {"method.wrappers.0.mu": "0.1,1"}, None, None, [0])
    assert [config.method.wrappers[0].options for config in plan.configs] == [{"mu": 0.1}, {"mu": 1}]


def test_draws_are_reproducible_and_in_range() -> None:
    space = parse_space({"training.lr": "1e-4..1e-1", "method.r": "2..9", "method.name": "fedit,rolora"})
    drawn = list_combinations(space, 200, 7)
    assert drawn == list_combinations(space, 200, 7)
    assert drawn[:20] == list_combinations(space, 20, 7)
    assert drawn != list_combinations(space, 200, 8)
    rates = np.array([one["training.lr"] for one in drawn])
    assert rates.min() >= 1e-4
    assert rates.max() <= 1e-1
    # Log-uniform: a third of the draws in each decade, 0.33 ± 0.03 over 200.
    for low in (1e-4, 1e-3, 1e-2):
        assert 0.2 < np.mean((low <= rates) & (rates < 10 * low)) < 0.47
    ranks = [one["method.r"] for one in drawn]
    assert set(ranks) == set(range(2, 10))
    assert all(type(rank) is int for rank in ranks)
    assert {one["method.name"] for one in drawn} == {"fedit", "rolora"}


def test_every_combination_is_drawn_once() -> None:
    space = parse_space({"method.r": "1..3", "training.lr": [0.1, 0.2]})
    drawn = list_combinations(space, 6, 0)
    assert sorted(map(str, drawn)) == sorted(
        str({"method.r": r, "training.lr": lr}) for r in (1, 2, 3) for lr in (0.1, 0.2)
    )
    with refused("--trials"):
        list_combinations(space, 7, 0)
    with refused("--trials"):
        list_combinations({"a": Range(1.0, 1.0001)}, 20, 0)


def test_values_are_yaml() -> None:
    assert parse_space({"a": "[query],[query, value]", "b": "true, null"}) == {
        "a": (["query"], ["query", "value"]),
        "b": (True, None),
    }


OVER = {"training.lr": "1e-3,2e-2"}


@pytest.fixture(scope="module")
def made(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SweepReport, RecordingWatcher]:
    folder, watcher = tmp_path_factory.mktemp("sweep") / "made", RecordingWatcher()
    values = values_of(tiny_folder)
    return folder, fedspan.sweep(values, folder, OVER, rounds=1, seeds=[5, 6], listener=watcher), watcher


def test_the_best_trial_by_validation_comes_first(made: tuple[Path, SweepReport, RecordingWatcher]) -> None:
    folder, report, watcher = made
    assert watcher.finished == [f"trial-{number:03}-seed{seed}" for number in (1, 2) for seed in (5, 6)]
    means = []
    for trial in report.trials:
        runs = [folder / f"trial-{trial.number:03}-seed{seed}" for seed in (5, 6)]
        for run, seed in zip(runs, (5, 6), strict=True):
            config = read_config(run)
            assert (config.seed, config.partition.seed, config.federation.rounds) == (seed, 5, 1)
            assert config.baselines == []
            assert config.training.lr == float(trial.values["training.lr"])
        scores = [read_report(run).scores["validation"]["accuracy"] for run in runs]
        assert trial.scores == tuple(scores)
        assert trial.mean == pytest.approx(sum(scores) / 2)
        assert trial.deviation == pytest.approx(np.std(scores, ddof=1))
        means.append(trial.mean)
    assert means == sorted(means, reverse=True)
    rows = list(csv.DictReader((folder / "table.csv").open()))
    assert [int(row["trial"]) for row in rows] == [trial.number for trial in report.trials]
    assert [float(row["validation_mean"]) for row in rows] == means
    assert [row["training.lr"] for row in rows] == [trial.values["training.lr"] for trial in report.trials]


def test_nothing_of_a_test_is_in_the_table_or_its_files(
    made: tuple[Path, SweepReport, RecordingWatcher], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With scores on tests that would choose the worst trial, and no name but their own, all is as before."""
    folder, report, _ = made
    worst = f"trial-{report.trials[-1].number:03}"
    train = execution.train.run

    def poisoned(config: Any, place: Path, **more: Any) -> Any:
        played = train(config, place, **more)
        score = 0.987654 if Path(place).name.startswith(worst) else 0.012345
        scores = {**played.scores, "test": {"accuracy": score}, "clients": {"accuracy": score}}
        return replace(played, scores=scores, by_client={id: {"accuracy": score} for id in played.by_client})

    monkeypatch.setattr(execution.train, "run", poisoned)
    watcher = RecordingWatcher()
    other = fedspan.sweep(values_of(tiny_folder), tmp_path / "made", OVER, rounds=1, seeds=[5, 6], listener=watcher)
    assert [trial.number for trial in other.trials] == [trial.number for trial in report.trials]
    assert [trial.scores for trial in other.trials] == [trial.scores for trial in report.trials]
    assert watcher.scores == made[2].scores
    assert (tmp_path / "made" / "best.yaml").read_text() == (folder / "best.yaml").read_text()
    files = [entry for entry in (tmp_path / "made").iterdir() if entry.is_file()]
    assert {entry.name for entry in files} == {"table.csv", "table.md", "table.tex", "best.yaml", "sweep.yaml"}
    said = repr(other) + "".join(entry.read_text() for entry in files)
    for poison in ("0.987654", "0.012345", "98.8"):
        assert poison not in said
    page = (folder / "table.md").read_text()
    for stated in ("Command: `", "Date: 20", "Machine: ", "torch ", "over the seeds 5, 6", "higher is better"):
        assert stated in page


def test_the_best_config_runs_with_the_rounds_and_baselines_of_the_config(
    made: tuple[Path, SweepReport, RecordingWatcher], tiny_folder: Path, tmp_path: Path
) -> None:
    folder, report, _ = made
    assert report.best == str(folder / "best.yaml")
    best, base = load_config(report.best), fedspan.load_config(_written(tmp_path, values_of(tiny_folder)))
    values = report.trials[0].values
    assert best.training.lr == float(values["training.lr"])
    assert (best.federation, best.baselines, best.seed) == (base.federation, base.baselines, base.seed)
    # On the division of the trials: what chose the settings never is in the test set.
    assert best.partition == base.partition.model_copy(update={"seed": 5})
    assert fedspan.run(report.best, tmp_path / "run").rounds == 3
    fingerprints = {
        json.loads((path / "partition.json").read_text())["fingerprint"]
        for path in (tmp_path / "run", folder / "trial-001-seed6")
    }
    assert len(fingerprints) == 1


def _written(folder: Path, values: dict[str, Any]) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_a_trial_that_diverges_has_failed_and_the_sweep_continues(tiny_folder: Path, tmp_path: Path) -> None:
    values = values_of(tiny_folder, training={"max_grad_norm": 0, "optimizer": "sgd"}, federation={"rounds": 2})
    folder, call = tmp_path / "made", {"over": {"training.lr": "1e30,0.02"}, "seeds": [0, 1]}
    with pytest.raises(KeyboardInterrupt):
        fedspan.sweep(values, folder, listener=(first := RecordingWatcher("trial-002-seed1")), **call)
    assert first.failed == ["trial-001-seed0"]
    second = RecordingWatcher()
    report = fedspan.resume_sweep(folder, listener=second)
    assert second.failed == ["trial-001-seed0"]
    assert second.finished == ["trial-002-seed1"]
    assert not (folder / "trial-001-seed1").exists()
    lost = report.trials[-1]
    assert (lost.number, lost.mean, lost.seconds) == (1, None, None)
    assert "training.lr" in lost.failed
    assert "| 1 | 1e30 | failed | - |" in (folder / "table.md").read_text()
    straight = fedspan.sweep(values, tmp_path / "straight", **call)
    assert [(trial.number, trial.scores) for trial in straight.trials] == [
        (trial.number, trial.scores) for trial in report.trials
    ]
    assert (folder / "best.yaml").read_bytes() == (tmp_path / "straight" / "best.yaml").read_bytes()


def test_lower_is_better_for_a_loss(tiny_folder: Path, tmp_path: Path) -> None:
    values = values_of(tiny_folder, evaluation={"metric": "loss"})
    report = fedspan.sweep(values, tmp_path / "made", {"training.lr": [1e-5, 0.05]}, rounds=2)
    assert not report.higher
    means = [trial.mean for trial in report.trials]
    assert means == sorted(means, key=lambda mean: mean or 0)
    assert means[0] != means[1]


def test_of_equal_scores_the_smaller_loss_wins(tiny_folder: Path, tmp_path: Path) -> None:
    over = {"training.lr": [1e-5, 2e-5, 3e-5]}
    settings = values_of(tiny_folder)
    made = fedspan.sweep(settings, tmp_path / "made", over, rounds=1)
    plan = plan_sweep(settings, over, None, 1, [0])
    reports = {step.name: read_report(tmp_path / "made" / step.name) for step in plan.steps}
    losses = dict(zip(reports, [0.7, 0.5, 0.6], strict=True))
    equal = {
        name: replace(report, scores={"validation": {made.metric: 0.8, "loss": losses[name]}})
        for name, report in reports.items()
    }
    assert [trial.number for trial in rank_trials(plan, equal, {})] == [2, 3, 1]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"over": {}}, "--over"),
        ({"over": {"method.r": ""}}, "--over"),
        ({"over": {"method.r": "[1"}}, "--over"),
        ({"over": {"method.r": "4,8,4"}}, "--over"),
        ({"over": {"method..r": "4"}}, "--over"),
        ({"over": {"method.r": "8..4"}, "trials": 2}, "--over"),
        ({"over": {"training.lr": "0.0..0.1"}, "trials": 2}, "--over"),
        ({"over": {"training.lr": "1e-4..0.1"}}, "--over"),
        ({"over": {"method.r": "1..4"}, "trials": 9}, "--trials"),
        ({"trials": 0}, "--trials"),
        ({"rounds": 0}, "--rounds"),
        ({"seeds": []}, "--seeds"),
        ({"over": {"training.rate": "1,2"}}, "training.rate"),
        ({"over": {"method.r": "4,zwei"}}, "method.r"),
        ({"over": {"training.lr": "0.1,-1"}}, "training.lr"),
        ({"over": {"seed": "1,2"}}, "--over"),
        ({"over": {"data.max_examples": "50"}}, "--over"),
        ({"over": {"training.lr": [np.float64(0.1)]}}, "--over"),
        ({"overrides": ["partition.validation=0"]}, "partition.validation"),
    ],
)
def test_mistakes_are_named_at_once(change: dict[str, Any], field: str, tiny_folder: Path, tmp_path: Path) -> None:
    call = {"config": values_of(tiny_folder), "over": {"method.r": "1,2"}, **change}
    with refused(field):
        fedspan.sweep(folder=tmp_path / "made", **call)
    assert not (tmp_path / "made").exists()
