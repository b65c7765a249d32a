"""Scripts of the evidence, tiny and on the CPU: reviews, subsets, plain tools, methods, the GPU and the engines."""

import csv
import importlib.util
import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from scipy import stats

from evidence.pages import corpus, methods, outside_reference, subsets
from evidence.pages.engines.watch import Watch
from fedspan.config import load_config
from fedspan.data.builtin import find_corpus_file
from fedspan.errors import FedspanError
from fedspan.models.quantized import dequantize, is_quantized
from fedspan.runs.predictions import Items
from helpers import tiny
from helpers.scripts import load_script


def read_rows(split: str) -> list[dict[str, str]]:
    with find_corpus_file("builtin:review-sentences", split, "data.train").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_shipped_sentences_have_no_crude_word_and_occur_once() -> None:
    rows = [row for split in ("train", "test") for row in read_rows(split)]
    assert len({row["text"].lower() for row in rows}) == len(rows) > 2800
    assert {row["site"] for row in rows} == set(corpus.SITES.values())
    assert not [row["text"] for row in rows if corpus.CRUDE.search(row["text"])]


def test_crude_and_repeated_sentences_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, stem in enumerate(corpus.SITES):
        lines = [f"Sentence  {letter} of site {number}.\t{number % 2}" for letter in "abcde"]
        lines += ["What utter CRAP.\t0", "Good,\u2028really good.\t1", "good, really GOOD.\t1"]
        (tmp_path / f"{stem}_labelled.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    monkeypatch.setattr("fedspan.data.builtin.files", lambda package: tmp_path)
    (tmp_path / "corpus").mkdir()
    corpus.write_review_sentences(tmp_path)
    train, test = (read_rows(split) for split in ("train", "test"))
    assert (len(train), len(test)) == (13, 3)
    assert {(row["text"], row["label"], row["site"]) for row in [*train, *test]} == {
        ("Good, really good.", "positive", "phones"),
        *((f"Sentence {letter} of site 0.", "negative", "phones") for letter in "abcde"),
        *((f"Sentence {letter} of site 1.", "positive", "films") for letter in "abcde"),
        *((f"Sentence {letter} of site 2.", "negative", "restaurants") for letter in "abcde"),
    }


NAME = "Banking77, 20 classes"


@pytest.fixture
def args(tmp_path: Path) -> Namespace:
    """A bank whose 30 intents have 100 queries each."""
    folder = tmp_path / "data" / "banking77"
    folder.mkdir(parents=True)
    for part in ("train", "test"):
        with (folder / f"{part}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["text", "category"])
            rows.writerows((f"{part} query {number}", f"intent-{number % 30:02}") for number in range(3000))
    paths = {"data": tmp_path / "data", "models": tmp_path, "out": tmp_path / "out"}
    return Namespace(**paths, only=[NAME], seeds=[0, 1])


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_subsets_are_drawn_by_their_seed_from_the_first_classes(args: Namespace) -> None:
    drawn = []
    for seed in (0, 1):
        train, test = subsets.write_data(subsets.Cell("Banking77", "IID", seed), args)
        assert subsets.write_data(subsets.Cell("Banking77", "Dirichlet 0.3", seed), args) == (train, test)
        drawn.append(rows_of(train))
        assert {row["text"].split()[0] for row in rows_of(test)} == {"test"}
    assert [len(rows) for rows in drawn] == [1200, 1200]
    assert drawn[0] != drawn[1]
    train, _ = subsets.write_data(subsets.Cell(NAME, "IID", 0), args)
    assert {row["category"] for row in rows_of(train)} == {f"intent-{number:02}" for number in range(20)}


def test_only_what_belongs_to_the_experiment_is_set(args: Namespace) -> None:
    made = subsets.config_of(subsets.Cell(NAME, "Dirichlet 0.3", 1), args)
    (path,) = (args.out / "configs").iterdir()
    assert subsets.write_data(subsets.Cell(NAME, "IID", 1), args)[1] == Path(made.data.test)
    own, changed = load_config(path).model_dump(), made.model_dump()
    differences = {
        f"{section}.{field}" if isinstance(own[section], dict) else section
        for section in own
        for field in (own[section] if isinstance(own[section], dict) else [section])
        if (own[section][field] if isinstance(own[section], dict) else own[section])
        != (changed[section][field] if isinstance(own[section], dict) else changed[section])
    }
    assert differences == {"seed", "threads", "partition.partitioner", "partition.alpha"}


@pytest.mark.parametrize("classes", [2, 3])
def test_a_warm_head_predicts_as_the_regression(classes: int) -> None:
    rng = np.random.default_rng(0)
    features, targets = torch.from_numpy(rng.normal(size=(60, 5))).float(), rng.integers(classes, size=60)
    regression = outside_reference.fit_regression(features, targets, 1.0)
    head = outside_reference.build_head(5, classes, regression)
    probabilities = head(features).softmax(1).detach().numpy()
    assert probabilities == pytest.approx(regression.predict_proba(features.numpy()), abs=1e-5)


def test_a_class_without_training_rows_keeps_its_random_weights() -> None:
    features, targets = torch.eye(4), np.array([0, 2, 3, 3])
    head = outside_reference.build_head(4, 5, outside_reference.fit_regression(features, targets, 1.0))
    assert head.weight.shape == (5, 4)
    assert set(head(features).argmax(1).tolist()) <= {0, 1, 2, 3, 4}
    known = outside_reference.fit_regression(features, targets, 1.0).coef_
    assert head.weight[[0, 2, 3]].detach().numpy() == pytest.approx(known, abs=1e-6)


def test_results_are_computed_once(tmp_path: Path) -> None:
    path = tmp_path / "cells.json"
    assert outside_reference.Cells(path).get("a | 0", lambda: 0.5) == 0.5
    assert outside_reference.Cells(path).get("a | 0", lambda: pytest.fail("computed again")) == 0.5


def test_errors_are_compared_with_those_of_the_better_head_and_of_the_regression() -> None:
    name = "SST-2"
    cells = {
        **{f"{name} | {seed} | {outside_reference.REGRESSION}": 0.75 for seed in (0, 1)},
        **{f"{name} | {seed} | PEFT, warm head": accuracy for seed, accuracy in enumerate((0.8, 0.9))},
        f"{name} | 0 | PEFT, cold head": 0.6,
        **{f"{name} | IID | {seed} | fedspan": {"accuracy": accuracy} for seed, accuracy in enumerate((0.7, 0.9))},
    }
    args = Namespace(only=[name], seeds=[0, 1, 2])
    table = outside_reference.build_table(cells, args).splitlines()
    rows = [line.strip("| ").split(" | ") for line in table if line.startswith(f"| {name}")]
    assert [row[1:4] for row in rows] == [
        ["pooled", outside_reference.REGRESSION, "2"],
        ["pooled", "PEFT, warm head", "2"],
        ["pooled", "PEFT, cold head", "1"],
        ["IID", "fedspan", "2"],
    ]
    assert [row[4].split()[0] for row in rows] == ["75.0", "85.0", "60.0", "80.0"]
    assert [row[5].split()[0] for row in rows[::3]] == ["1.77", "1.22"]  # (5/4 * 5/2) ** 0.5, (3/2 * 1) ** 0.5
    assert rows[3][6].split()[0] == "0.69"  # (6/5 * 2/5) ** 0.5
    assert table[-1] == "| IID | fedspan | 1 | 1.22 | inf |"


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


def test_the_rate_is_the_best_on_validation_and_others_are_tried_beyond_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("evidence/pages/gpu.py")


def page(script: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments, "--page", str(folder / "gpu.md")])
    script.main()
    return (folder / "gpu.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_part_is_measured(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page(script, tmp_path, monkeypatch, "--smoke", "--device", "cpu", "--batches", "1", "--clients", "1", "2")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| tiny")]
    both = ["| tiny RoBERTa", "| tiny Llama"]
    assert [row[0] for row in rows] == [*both, "| tiny Llama", "| tiny Llama", *both]
    for row in rows[:2]:
        loop, one, two = (float(cell.replace(",", "")) for cell in row[2:5])
        assert float(row[5]) == pytest.approx(two / loop, rel=0.1, abs=0.06)
        assert one > 0
    assert [row[1] for row in rows[2:4]] == ["float32", "NF4"]
    if importlib.util.find_spec("bitsandbytes") is not None:
        assert all(float(cell.replace(",", "")) > 0 for row in rows[2:4] for cell in row[2:4])
    for row in rows[4:]:
        assert row[1] == row[2]  # the device is the CPU
        assert row[3] == row[4]
        assert 0 < float(row[1]) < 1e-4
    assert "--sections" not in text
    assert "| pass |" not in text
    assert "FAIL" not in text


def test_a_base_in_four_bits_keeps_its_head(script: ModuleType) -> None:
    pytest.importorskip("bitsandbytes", reason="the extra fedspan[quantization] is not installed")
    shape = script.SMOKE[1]
    plain = script.build(shape, torch.float32, torch.device("cpu"))
    quantized = script.quantize(script.build(shape, torch.float32, torch.device("cpu")), torch.float32)
    weights = {path: module.weight for path, module in plain.named_modules() if isinstance(module, torch.nn.Linear)}
    stored = {path for path in weights if is_quantized(quantized.get_submodule(path))}
    assert set(weights) - stored == {"lm_head"}
    for path in stored:
        found = dequantize(quantized.get_submodule(path))
        assert torch.allclose(found, weights[path], atol=0.01)
        assert not torch.equal(found, weights[path])
    bench = script.Bench.prepare(shape, script.adapt(shape, quantized), 2, 1)
    assert len(bench.train()) == 2


def test_the_engine_s_seconds_leave_out_what_it_calls_back() -> None:
    def train_all(examples: Any, sizes: Any, opened: Any, finished: Any) -> None:
        time.sleep(0.1)
        opened("client")
        finished(None, None)

    engine = SimpleNamespace(train_all=train_all, predict=lambda: time.sleep(0.1), stacking=None)
    watch = Watch(engine)
    engine.train_all(None, {}, lambda _: time.sleep(0.3), lambda *_: time.sleep(0.3))
    assert 0.1 <= watch.take() < 0.3
    engine.predict()
    assert 0.1 <= watch.take() < 0.3
    assert watch.take() == 0.0


@pytest.mark.slow
def test_a_page_comes_of_every_section(tmp_path: Path) -> None:
    for name, count in (("train", 64), ("test", 8)):
        rows = [
            f"how do I change the {'limit' if number % 2 else 'address'} {number},{number % 2}"
            for number in range(count)
        ]
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,category", *rows]) + "\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    sizes = ["--clients", "2", "--threads", "1", "--examples", "4", "4", "--examples", "32", "32", "--registered", "20"]
    runs = ["--at-once", "2", "--accuracy-examples", "16", "--accuracy-rounds", "1", "--accuracy-seeds", "0"]
    places = ["--data", str(tmp_path), "--out", str(tmp_path / "out"), "--page", str(tmp_path / "page.md")]
    command = [sys.executable, "-m", "evidence.pages.engines", *places, *sizes, *runs, "--repetitions", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.md").read_text()
    assert "FAIL" not in page
    judged = [line for line in page.splitlines() if line.endswith(("| pass |", "| not judged |"))]
    assert [line for line in judged if line.endswith("| pass |")] == [
        line for line in judged if "float32 losses" in line
    ]
