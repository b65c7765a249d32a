"""The benchmark of the methods: rates by validation, runs that are not repeated, and intervals."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy import stats

from evidence.pages import methods
from fedspan.errors import FedspanError
from fedspan.runs.predictions import Items
from helpers import tiny


def write_settings(folder: Path, tiny_folder: Path) -> Path:
    """Two cells and three methods on the tiny corpus."""
    config = tiny.config(tiny_folder).model_dump(mode="json", exclude_unset=True)
    changes = {"federation": {"rounds": 1, "clients_per_round": None}, "partition": {"clients": 2, "validation": 0.3}}
    common = methods.merge(config, changes)
    common["partition"] |= {"partitioner": "iid", "column": None}
    cells = {"a": {"rate": 0.01, "config": {}}, "b": {"rate": 0.01, "config": {}, "set": {"partition": {"clients": 3}}}}
    settings = {"common": common, "cells": cells, "methods": {"fedit": {}, "ffa-lora": {"rate": 2.0}}, "bounds": {}}
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.mark.slow
def test_the_command_finishes_its_runs_and_writes_a_page(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = write_settings(tmp_path, tiny_folder)
    monkeypatch.setattr(methods, "SEEDS", (0, 1))
    words = ["methods.py", "--out", str(tmp_path / "out"), "--settings", str(settings)]
    for shard in ("1/2", "2/2", "1/1"):
        monkeypatch.setattr("sys.argv", [*words, "--data", str(tiny_folder), "--shard", shard])
        methods.main()
    runs = sorted((tmp_path / "out" / "runs").rglob("report.json"))
    times = [path.stat().st_mtime_ns for path in runs]
    methods.main()  # nothing is left to run
    assert [path.stat().st_mtime_ns for path in runs] == times
    folder = tmp_path / "out" / "runs" / "a" / "ffa-lora"
    rate = json.loads((folder / "rate.json").read_text())["rate"]
    assert {f"rate-{rate:g}-seed-{seed}" for seed in (0, 1)} <= {path.name for path in folder.iterdir()}
    monkeypatch.setattr("sys.argv", [*words, "--page", str(tmp_path / "page.md")])
    methods.main()
    page = (tmp_path / "page.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("## ")] == ["## All cells", "## a", "## b"]
    assert page.count("| ffa-lora |") == 3
    assert (tmp_path / "page.svg").stat().st_size > 1000


def test_the_rate_is_the_best_on_validation_and_others_are_tried_beyond_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = methods.Pair("cell", "fedit", {}, 1.0, Path("none"))
    tried: list[float] = []

    def validate(_: methods.Pair, rate: float) -> float:
        tried.append(rate)
        return -abs(np.log(rate / best))

    monkeypatch.setattr(methods.Pair, "_validate", validate)
    for best, expected in ((1.0, [0.25, 1, 4]), (16.0, [0.25, 1, 4, 16, 64]), (1 / 64, [0.25, 1, 4, 1 / 16, 1 / 64])):
        tried.clear()
        assert pair.select_rate() == best
        assert tried == expected


def test_a_rate_that_diverges_is_the_worst_and_a_busy_folder_is_left_for_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what the config cannot do is recorded as refused."""
    pair, fields = methods.Pair("cell", "fedit", {}, 1.0, tmp_path), {4.0: "training.lr", 1.0: "run folder"}

    def run(_: methods.Pair, rate: float, seed: int) -> None:
        raise FedspanError(fields[rate], rate)

    monkeypatch.setattr(methods.Pair, "run", run)
    assert pair._validate(4.0) == -np.inf
    monkeypatch.setattr(methods.Pair, "select_rate", lambda _: 1.0)
    methods.run_cell([pair])
    assert not list(tmp_path.iterdir())
    fields[1.0] = "method.name"
    methods.run_cell([pair])
    assert "method.name" in json.loads((tmp_path / "rate.json").read_text())["refused"]


def test_a_method_is_compared_with_the_reference_by_what_differs_between_cells() -> None:
    """With two methods the interval is that of the paired t-test over cells."""
    means = np.array([[50.0, 70.0, 90.0, 60.0], [52.0, 71.0, 94.0, 61.0]])
    differences, half = methods.compare_jointly(means)
    paired = means[1] - means[0]
    assert differences == pytest.approx([paired.mean()])
    expected = stats.t.ppf(0.975, 3) * paired.std(ddof=1) / 2
    assert half == pytest.approx(expected, rel=0.02)  # quantiles are drawn


def test_the_interval_of_two_comparisons_is_dunnett_s() -> None:
    means = np.array([[50.0, 70.0, 90.0, 60.0], [52.0, 71.0, 94.0, 61.0], [49.0, 75.0, 92.0, 60.0]])
    residuals = means - means.mean(0) - means.mean(1, keepdims=True) + means.mean()
    error = np.sqrt((residuals**2).sum() / 6 * 2 / 4)
    # 2.86: Dunnett's two-sided table at 5 %, two comparisons, 6 degrees of freedom
    assert methods.compare_jointly(means)[1] / error == pytest.approx(2.86, rel=0.01)


def make_result(correct: np.ndarray) -> methods.Result:
    """A result with predictions: (seeds, items), whether each is right."""
    targets, labels = np.zeros(correct.shape[1], np.int32), ("a", "b")
    items = tuple(Items(targets, (1 - row.astype(np.int32))[None], labels, "digest") for row in correct)
    return methods.Result(0.1, "accuracy", tuple(correct.mean(1)), 1.0, 1.0, items)


def test_the_interval_of_a_cell_has_the_noise_of_seeds_and_of_items() -> None:
    rng = np.random.default_rng(1)
    first, second = rng.random((6, 400)) < 0.8, rng.random((6, 400)) < 0.7
    low, high = methods.bootstrap_difference("accuracy", make_result(first), make_result(second))
    mean = float(first.mean() - second.mean())
    assert low < mean < high
    # Independent seeds and items: the variance of the mean is that of single answers over their number.
    expected = 2 * 1.96 * np.sqrt((0.8 * 0.2 + 0.7 * 0.3) / 2400)
    assert expected < high - low < 2.5 * expected
    same = make_result(np.ones((6, 400), bool))
    assert methods.bootstrap_difference("accuracy", same, same) == (0.0, 0.0)
