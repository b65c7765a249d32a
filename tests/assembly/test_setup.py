"""The setup of a run: what is built from its config, and what is refused before anything is written."""

import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import AutoTokenizer

import fedspan
from fedspan.assembly.engine import (
    compute_max_length,
    keep_stacking_plan,
    require_private_model,
    set_algorithms,
)
from fedspan.assembly.model import ModelObjects
from fedspan.assembly.run import Objects, Prepared, _find_test_parts, prepare
from fedspan.config import parse_config
from fedspan.config.run import RunConfig
from fedspan.errors import FedspanError
from fedspan.federation.evaluation import Evaluator
from fedspan.federation.progress import Progress
from fedspan.models.adapted import AdaptedModel
from fedspan.run_folder import RunFolder
from fedspan.runs import start
from fedspan.runs.start import run
from fedspan.training.stacking import StackingPlan
from fedspan.training.worker import Worker
from helpers import tiny
from helpers.refusals import refused


def test_values_that_differ_in_a_trailing_nul_or_are_long_are_parts_of_their_own() -> None:
    long = "y" * 2**14
    test = Dataset.from_dict({"site": ["x", "x\0", long, "x", *["w"] * 2000, "x\0"]})
    tracemalloc.start()
    try:
        parts = _find_test_parts(test, "site")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2000 * len(long)  # not every name takes the memory of the longest one
    assert list(parts) == ["w", "x", "x\0", long]
    assert {value: rows.tolist() for value, rows in parts.items() if value != "w"} == {
        "x": [0, 3],
        "x\0": [1, 2004],
        long: [2],
    }
    assert np.array_equal(parts["w"], np.arange(4, 2004))


def test_scores_by_value_need_a_held_out_set_with_the_column(tiny_folder: Path) -> None:
    settings = tiny.settings(tiny_folder, evaluation={"by": "siet"})
    with pytest.raises(FedspanError, match=r"no column named 'siet'.*Did you mean 'site'"):
        prepare(parse_config(settings))
    settings["data"]["test_fraction"] = 0
    with refused("evaluation.by"):
        prepare(parse_config(settings))


CONFIG = parse_config({"data": {"train": "train.csv"}})


def fail(*_: Any) -> Any:
    raise AssertionError("nothing may be built")


def test_a_new_run_needs_a_config(tmp_path: Path) -> None:
    with refused("config"):
        run(None, tmp_path / "run", build=fail)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(FedspanError, match=r"notes\.txt"):
        run(CONFIG, tmp_path, build=fail)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_diagnoses_need_clients_in_this_process(tmp_path: Path) -> None:
    config = parse_config({"data": {"train": "train.csv"}, "evaluation": {"diagnostics": 2}})
    with pytest.raises(FedspanError, match="diagnostics need engine.name batched or loop".replace(".", r"\.")):
        run(config, tmp_path / "run", build=fail, host=fail)
    assert list(tmp_path.iterdir()) == []


def test_an_invalid_config_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "resolve_pooling", lambda config: (config, None))  # which loads the model's config

    def refuse(*_: Any) -> Any:
        raise FedspanError("data.train", "train.csv", "a file")

    with pytest.raises(FedspanError, match=r"data\.train"):
        run(CONFIG, tmp_path / "run", build=refuse)
    assert not (tmp_path / "run").exists()


def config(**changes: Any) -> RunConfig:
    return parse_config({"data": {"train": "train.csv"}, **changes})


class Positions(nn.Module):
    """Positions, as RoBERTa has them if they have a padding index."""

    def __init__(self, count: int, padding: int | None, limit: int | None = None) -> None:
        super().__init__()
        self.position_embeddings = nn.Embedding(count, 4, padding_idx=padding)
        self.word_embeddings = nn.Embedding(3, 4, padding_idx=0)
        if limit is not None:
            self.config = SimpleNamespace(max_position_embeddings=limit)


@pytest.mark.parametrize(
    ("tokenizer", "model", "expected"),
    [
        (None, Positions(600, None), 100),
        (SimpleNamespace(model_max_length=64), Positions(600, None), 64),
        (SimpleNamespace(model_max_length=10**30), Positions(600, None, 40), 40),
        (None, Positions(50, 1, 50), 48),  # positions count from after the padding index
        (None, Positions(50, None, 50), 50),
    ],
)
def test_the_shortest_of_all_limits_counts(tokenizer: Any, model: nn.Module, expected: int) -> None:
    assert compute_max_length(config(model={"max_length": 100}), tokenizer, model) == expected


def test_running_statistics_are_refused_under_privacy() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    norm = {"1.weight": model[1].weight, "1.bias": model[1].bias}
    buffers = {"1.running_mean": model[1].running_mean, "1.running_var": model[1].running_var}
    without, adapted = AdaptedModel(model, {"0": model[0]}, norm), AdaptedModel(model, {"0": model[0]}, norm, buffers)
    private = config(privacy={"mechanism": "dp-sgd", "noise": 1.0})
    require_private_model(config(), adapted)
    require_private_model(private, without)
    with pytest.raises(FedspanError, match=r"running statistics \(1\.running_mean, \.\.\.\) come from raw") as caught:
        require_private_model(private, adapted)
    assert (caught.value.field, caught.value.value) == ("privacy", "dp-sgd")
    assert torch.equal(model[1].running_mean, torch.zeros(3))


def test_an_untrained_head_that_was_passed_from_python_starts_from_statistics(tiny_folder: Path) -> None:
    def prepared(model: object, **changes: Any) -> Prepared:
        values = tiny.settings(tiny_folder, model={"head_init": "auto", **changes})
        objects = Objects(model=ModelObjects(model, AutoTokenizer.from_pretrained(tiny_folder / "bert")))
        values["model"]["name"] = "python:bert"
        return prepare(parse_config(values), objects=objects)

    model: Any = tiny.fresh_classifier(tiny_folder / "bert")
    run = prepared(model)
    assert run.head.kind == "lda"
    with torch.no_grad():
        model.classifier.bias.fill_(0.01)  # as after a step of training
    trained = prepared(model)
    assert trained.head is None
    assert any("starts with the weights of the model that was passed" in note for note in trained.notes)
    assert prepared(model, head_init="lda").head is not None


def test_the_start_of_a_run_is_evaluated_as_before_a_plan_is_known(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a run that was stopped in its first round, whose folder has a plan."""
    values = tiny.settings(tiny_folder, engine={"name": "batched", "clients_per_pass": 2, "workers": 2})
    values["partition"] = {**values["partition"], "validation": 0.2}
    plans, evaluate = list[StackingPlan | None](), Evaluator.evaluate_clients

    def record(evaluator: Evaluator, progress: Progress) -> Any:
        engine = evaluator.federation.engine
        plans.append(engine.stacking)
        return evaluate(evaluator, progress)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Worker, "run", stop)
        with pytest.raises(KeyboardInterrupt):
            fedspan.run(values, tmp_path / "run", progress=False)
    assert (tmp_path / "run" / "engine.json").exists()
    monkeypatch.setattr(Evaluator, "evaluate_clients", record)
    fedspan.resume(tmp_path / "run", progress=False)
    assert plans[0] is None
    assert plans[1:] == [StackingPlan(2, 2)] * (len(plans) - 1)
    assert len(plans) > 1


def test_a_plan_is_restored_and_numbers_of_the_config_replace_its_own(tiny_folder: Path, tmp_path: Path) -> None:
    """As after an error for too little memory: the next resume has them, too."""
    run_folder = RunFolder(tmp_path)
    run_folder.write_json(run_folder.engine, {"clients_per_pass": 8, "workers": 2})
    for options, expected in (({}, (8, 2)), ({"clients_per_pass": 3}, (3, 2)), ({}, (3, 2)), ({"workers": 1}, (3, 1))):
        engine = prepare(parse_config(tiny.settings(tiny_folder, engine={"name": "batched", **options}))).engine
        keep_stacking_plan(run_folder, engine)
        assert engine.stacking == StackingPlan(*expected)
    assert run_folder.read_json(run_folder.engine) == {"clients_per_pass": 3, "workers": 1}
    run_folder.write_json(run_folder.engine, {"clients_per_pass": None})
    with pytest.raises(FedspanError, match="two numbers, clients_per_pass and workers"):
        keep_stacking_plan(run_folder, engine)


GPU, CPU = torch.device("cuda:0"), torch.device("cpu")


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The values passed to ``torch.use_deterministic_algorithms``, in order."""
    found: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", found.append)
    monkeypatch.setattr("fedspan.assembly.engine._restricts_torch", False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    return found


def test_torch_is_restricted_for_runs_that_ask_for_it_alone(modes: list[bool]) -> None:
    set_algorithms(True, CPU)
    set_algorithms(False, GPU)  # the user's own setting stays
    assert modes == []
    set_algorithms(True, GPU)
    set_algorithms(True, GPU)
    set_algorithms(False, GPU)
    set_algorithms(False, GPU)
    assert modes == [True, True, False]
