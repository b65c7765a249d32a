"""Regression: numbers in, squared error, correlations out; and a run of it from a file of pairs to PEFT."""

import csv
import random
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch

import fedspan
from fedspan.assembly.run import Prepared, prepare
from fedspan.config import parse_config
from fedspan.data import PartitionConfig
from fedspan.data.partition import partition
from fedspan.errors import FedspanError
from fedspan.tasks.regression import Regression
from helpers import tiny
from helpers.fixed_logits import Fixed

CPU = torch.device("cpu")


@pytest.fixture
def task(prepared: Prepared) -> Regression:
    return Regression(prepared.task.tokenizer, 8)


def test_the_loss_is_the_mean_squared_error_and_correlations_are_the_textbook_s(task: Regression) -> None:
    truth, guess = [1.0, 2.0, 4.0, 3.5], [0.5, 2.5, 3.0, 9.0]
    examples = task.encode(datasets.Dataset.from_dict({"text": ["lab1"] * 4, "target": truth}))
    loss = task.compute_loss(Fixed(torch.tensor(guess)[:, None]), task.collate(examples, [0, 1, 2, 3], CPU))
    x, y = np.array(guess), np.array(truth)
    assert float(loss) == pytest.approx(np.mean((x - y) ** 2))
    metrics = task.compute_metrics(torch.tensor(guess)[:, None], examples, [0, 1, 2, 3])
    assert metrics["pearson"] == pytest.approx(np.corrcoef(x, y)[0, 1])
    ranks = np.corrcoef([0, 1, 2, 3], [0, 1, 3, 2])[0, 1]
    assert metrics["spearman"] == pytest.approx(ranks)
    assert metrics["loss"] == pytest.approx(np.mean((x - y) ** 2))
    assert task.decode_predictions(torch.tensor(guess)[:, None]) == ["0.500", "2.500", "3.000", "9.000"]
    assert task.decode_targets(examples, [2, 0]) == ["4.000", "1.000"]


@pytest.mark.parametrize(("guess", "truth"), [([1.0], [2.0]), ([1.0, 1.0], [2.0, 3.0]), ([1.0, 2.0], [3.0, 3.0])])
def test_a_correlation_without_a_value_is_left_out(guess: list[float], truth: list[float], task: Regression) -> None:
    examples = task.encode(datasets.Dataset.from_dict({"text": ["lab1"] * len(truth), "target": truth}))
    assert set(task.compute_metrics(torch.tensor(guess)[:, None], examples, list(range(len(truth))))) == {"loss"}


def pairs(folder: Path) -> Path:
    """120 pairs; the score, 0 to 5, is how many of five words they share."""
    rng, path = random.Random(1), folder / "pairs.tsv"
    words = [f"word{number}" for number in range(12)]
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t")
        writer.writerow(["one", "other", "score", "site"])
        for number in range(120):
            one, shared = rng.sample(words, 5), rng.randint(0, 5)
            other = rng.sample(one, shared) + rng.sample([w for w in words if w not in one], 5 - shared)
            writer.writerow([" ".join(one), " ".join(other), shared / 1.0, f"site{number % 3}"])
    return path


def settings(tiny_folder: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    values = tiny.settings(tiny_folder, **changes)
    data = {"train": str(pairs(folder)), "text": "one", "text_pair": "other", "label": "score", "test_fraction": 0.2}
    return {**values, "task": "regression", "data": data}


def test_a_run_of_regression_on_pairs(tiny_folder: Path, tmp_path: Path) -> None:
    training = {"lr": 0.01, "local_steps": None, "batch_size": 8, "local_epochs": 4}
    engine = {"name": "batched", "clients_per_pass": 4}
    federation = {"rounds": 2, "clients_per_round": None}
    values = settings(tiny_folder, tmp_path, federation=federation, training=training, engine=engine)
    report = fedspan.run(values, tmp_path / "run")
    assert (report.task, report.metric) == ("regression", "pearson")
    assert set(report.scores["test"]) == {"loss", "pearson", "spearman"}
    assert report.scores["clients"]["worst"].keys() == {"client", "pearson"}
    assert report.scores["test"]["loss"] < np.var([0, 1, 2, 3, 4, 5]) + 6.25  # that of answering 0 always
    measured = fedspan.evaluate(tmp_path / "run")
    for name, value in report.scores["test"].items():
        assert measured[name] == pytest.approx(value, rel=1e-4)
    numbers = fedspan.predict(tmp_path / "run", [("word1 word2", "word1 word2"), ("word1", "word5")])
    assert all(isinstance(number, float) for number in numbers)


def test_the_best_round_may_be_chosen_by_another_metric(tiny_folder: Path, tmp_path: Path) -> None:
    values = settings(tiny_folder, tmp_path, evaluation={"metric": "loss"})
    made = prepare(parse_config(values))
    assert made.task.metric == "loss"


@pytest.mark.parametrize("partitioner", ["dirichlet", "pathological"])
def test_numbers_are_divided_by_ranges(partitioner: str) -> None:
    """The ranges, of as many examples each, are what labels are to a division of classes."""
    numbers = np.random.default_rng(0).normal(size=400)
    ranks = np.argsort(np.argsort(numbers))
    config = PartitionConfig.model_validate({"partitioner": partitioner, "clients": 8, "alpha": 0.3, "bins": 5})
    found = partition(datasets.Dataset.from_dict({"target": numbers}), config, 7)
    classes = partition(datasets.Dataset.from_dict({"label": ranks // 80}), config.model_copy(update={"bins": None}), 7)
    assert found.fingerprint == classes.fingerprint
    tied = datasets.Dataset.from_dict({"target": [1.0] * 300 + [2.0] * 100})
    with pytest.raises(
        FedspanError, match=r"^`partition.bins`: 5 is not accepted\. Expected at most 2, the number of distinct numbers"
    ):
        partition(tied, config, 7)


def test_what_is_no_regression_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    values = settings(tiny_folder, tmp_path)
    dirichlet = {"partitioner": "dirichlet", "clients": 3}
    with pytest.raises(FedspanError, match="these examples have no classes") as caught:
        prepare(parse_config({**values, "partition": dirichlet}))
    assert (caught.value.field, caught.value.value) == ("partition.partitioner", "dirichlet")
    labeled = tiny.settings(tiny_folder, partition={**dirichlet, "column": None, "bins": 4})
    with pytest.raises(
        FedspanError, match=r"^`partition\.bins`: these examples have labels, not numbers\. Leave it out"
    ):
        prepare(parse_config(labeled))
    (tmp_path / "pairs.tsv").write_text("one\tother\tscore\tsite\na\tb\t3,500\tx\n")
    with pytest.raises(FedspanError, match="has '3,500' in column 'score': a decimal comma, or one between thousands"):
        prepare(parse_config({**values, "data": {**values["data"], "train": str(tmp_path / "pairs.tsv")}}))
