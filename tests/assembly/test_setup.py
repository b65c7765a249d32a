"""The setup of a run: what is built from its config and from objects of Python, and what is refused before."""

import copy
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from click.testing import CliRunner
from datasets import Dataset
from peft import AutoPeftModelForSequenceClassification, PeftConfig
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

import fedspan
from fedspan.assembly.engine import compute_max_length, keep_stacking_plan, require_private_model, set_algorithms
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
from fedspan.runs.integrity import read_config
from fedspan.runs.report import read_partition
from fedspan.runs.start import run
from fedspan.training.stacking import StackingPlan
from fedspan.training.worker import Worker
from helpers import tiny
from helpers.command_line import get_program
from helpers.listeners import Notes
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
    with refused("evaluation.by"):
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
    with refused("run folder", r"notes\.txt"):
        run(CONFIG, tmp_path, build=fail)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_diagnoses_need_clients_in_this_process(tmp_path: Path) -> None:
    config = parse_config({"data": {"train": "train.csv"}, "evaluation": {"diagnostics": 2}})
    with pytest.raises(FedspanError, match="diagnostics need engine.name batched or loop".replace(".", r"\.")):
        run(config, tmp_path / "run", build=fail, host=fail)
    assert list(tmp_path.iterdir()) == []


def test_an_invalid_config_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "resolve_pooling", lambda config: (config, None))  # which loads the model's config

    build = Mock(side_effect=FedspanError("data.train", "train.csv", "a file"))
    with refused("data.train"):
        run(CONFIG, tmp_path / "run", build=build)
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
    with refused("privacy", r"running statistics \(1\.running_mean, \.\.\.\) come from raw") as caught:
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

    with monkeypatch.context() as patched:
        patched.setattr(Worker, "run", Mock(side_effect=KeyboardInterrupt))
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
    with refused("engine", "two numbers, clients_per_pass and workers"):
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


@pytest.fixture
def frame(tiny_folder: Path) -> pd.DataFrame:
    return pd.read_csv(tiny.settings(tiny_folder)["data"]["train"])


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    values = tiny.settings(folder, federation={"rounds": 2, "clients_per_round": 2}, **changes)
    values["data"] = {name: value for name, value in values["data"].items() if name not in ("train", "test")}
    return values


def weights(folder: Path) -> dict[str, Any]:
    return {path.name: path.read_bytes() for path in (folder / "adapter").glob("*.safetensors")}


def test_a_data_frame_gives_the_run_of_its_file(tiny_folder: Path, tmp_path: Path, frame: pd.DataFrame) -> None:
    values = tiny.settings(tiny_folder, federation={"rounds": 2, "clients_per_round": 2})
    fedspan.run(values, tmp_path / "file")
    fedspan.run(settings(tiny_folder), tmp_path / "frame", data=frame)
    assert weights(tmp_path / "frame") == weights(tmp_path / "file")
    with refused("data", r"pass them again as run_data= of fedspan\.evaluate"):
        fedspan.evaluate(tmp_path / "frame")
    held_out = fedspan.evaluate(tmp_path / "file")
    assert fedspan.evaluate(tmp_path / "frame", run_data=frame) == held_out
    assert fedspan.evaluate(tmp_path / "frame", data=frame)["examples"] == len(frame)
    assert fedspan.evaluate(tmp_path / "frame", data={"train": frame, "test": frame[:7]})["examples"] == 7


def test_data_by_client_are_the_partition(tiny_folder: Path, tmp_path: Path, frame: pd.DataFrame) -> None:
    by_client = {"north": frame[: len(frame) // 2], "south": frame[len(frame) // 2 :]}
    values = settings(tiny_folder)
    values.pop("partition", None)
    fedspan.run(values, tmp_path / "run", data=by_client)
    assert [part.id for part in read_partition(tmp_path / "run").clients] == ["north", "south"]
    config = read_config(tmp_path / "run")
    assert (config.partition.partitioner, config.partition.column) == ("natural", "client")
    values["partition"] = {"partitioner": "dirichlet"}
    with refused("partition.partitioner"):
        fedspan.run(values, tmp_path / "other", data=by_client)


def test_a_model_is_copied_and_resume_needs_it_again(tiny_folder: Path, tmp_path: Path, frame: pd.DataFrame) -> None:
    name = str(tiny_folder / "bert")
    labels = frame["label"].nunique()
    model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=labels)
    tokenizer = AutoTokenizer.from_pretrained(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    values = settings(tiny_folder)
    values["model"].pop("name")
    objects = {"data": frame, "model": model, "tokenizer": tokenizer}
    fedspan.run(values, tmp_path / "whole", **objects)
    assert all(bool((before[key] == value).all()) for key, value in model.state_dict().items())
    adapter = tmp_path / "whole" / "adapter"
    assert PeftConfig.from_pretrained(str(adapter)).base_model_name_or_path == name
    AutoPeftModelForSequenceClassification.from_pretrained(str(adapter), num_labels=labels)
    assert len(fedspan.predict(tmp_path / "whole", ["a1 b2"])) == 1

    with pytest.raises(KeyboardInterrupt):
        fedspan.run(values, tmp_path / "stopped", listener=Notes(1), **objects)
    with refused("data", "passed from Python: pass"):
        fedspan.resume(tmp_path / "stopped")
    with refused("model", "the model of this run was passed from Python: pass it again as model="):
        fedspan.resume(tmp_path / "stopped", data=frame)
    changed = AutoModelForSequenceClassification.from_pretrained(name, num_labels=labels)
    with torch.no_grad():
        changed.bert.embeddings.word_embeddings.weight[0, 0] += 1
    with refused("model"):
        fedspan.resume(tmp_path / "stopped", **{**objects, "model": changed})
    place = tmp_path / "stopped" / "config.yaml"
    text = place.read_text()
    place.write_text(yaml.safe_dump({**yaml.safe_load(text), "cluster": {"workers": 2}}, explicit_end=True))
    with refused("model", "only data can be passed to a run on a cluster"):
        fedspan.resume(tmp_path / "stopped", **objects)
    place.write_text(text)
    report = fedspan.resume(tmp_path / "stopped", **objects)
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")

    other = 3 - report.best_round  # of two rounds, the one that the run did not export

    def export(run: Path, **given: Any) -> Path:
        return fedspan.export(run, tmp_path / "other", round=other, **given)

    for call in (fedspan.diagnose, export):
        with refused("data", "the data of this run were passed from Python: pass them again as data"):
            call(tmp_path / "stopped")
        with refused("model", "the model of this run was passed from Python: pass it again as model="):
            call(tmp_path / "stopped", data=frame)
    assert fedspan.diagnose(tmp_path / "stopped", pairs=0, **objects).round == 3
    exported = export(tmp_path / "stopped", **objects)
    assert weights(tmp_path / "whole") != {path.name: path.read_bytes() for path in exported.glob("*.safetensors")}
    shown = CliRunner().invoke(get_program(), ["diagnose", str(tmp_path / "stopped")])
    assert shown.exit_code == 2
    assert "pass them again as data= of fedspan.diagnose (the command line has no such option)" in shown.output


def test_a_model_whose_weights_no_name_has(tiny_folder: Path, tmp_path: Path, frame: pd.DataFrame) -> None:
    """The base of the adapter is the object, whatever is stored under its name."""
    name = str(tiny_folder / "bert")
    torch.manual_seed(1)  # of the head, whose size shows how much the base matters
    model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=frame["label"].nunique())
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight.mul_(-3.0)
    values = settings(tiny_folder)
    values["model"].pop("name")
    objects = {"model": model, "tokenizer": AutoTokenizer.from_pretrained(name)}
    report = fedspan.run(values, tmp_path / "run", data=frame, **objects)
    expected = report.scores["test"]["accuracy"], report.scores["test"]["loss"]
    found = fedspan.evaluate(tmp_path / "run", run_data=frame, **objects)
    assert (found["accuracy"], found["loss"]) == pytest.approx(expected, rel=1e-4)
    texts = frame["text"].tolist()[:5]
    answers = fedspan.predict(tmp_path / "run", texts, **objects)
    merged = fedspan.export(tmp_path / "run", tmp_path / "merged", form="merged", **objects)
    assert [label for label, _ in fedspan.predict(merged, texts)] == [label for label, _ in answers]
    plain = fedspan.evaluate(tmp_path / "run", run_data=frame)  # the base that its name has
    assert plain["loss"] != pytest.approx(found["loss"], rel=1e-3)


def test_a_model_without_a_name_is_passed_again(tiny_folder: Path, tmp_path: Path, frame: pd.DataFrame) -> None:
    """No weights are loaded by the name of its class, and no others are taken for those of the run."""
    source = AutoModelForSequenceClassification.from_pretrained(
        str(tiny_folder / "bert"), num_labels=frame["label"].nunique()
    )
    source.config.name_or_path = source.name_or_path = ""
    other = copy.deepcopy(source)
    with torch.no_grad():
        other.bert.embeddings.word_embeddings.weight[0, 0] += 1
    values = settings(tiny_folder, method={"name": "fedsa-lora"})  # each client has a model of its own
    values["model"].pop("name")
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_folder / "bert"))
    report = fedspan.run(values, tmp_path / "run", data=frame, model=source, tokenizer=tokenizer)
    client = next(iter(report.adapters))
    assert PeftConfig.from_pretrained(str(tmp_path / "run" / report.adapters[client])).base_model_name_or_path is None
    for folder in (tmp_path / "run", fedspan.export(tmp_path / "run", tmp_path / "own", client=client)):
        arguments: Any = {"client": client, "tokenizer": tokenizer}
        assert len(fedspan.predict(folder, ["a1 b2"], model=source, **arguments)) == 1
        with refused("model", "a BertForSequenceClassification that was passed from Python: pass"):
            fedspan.predict(folder, ["a1 b2"], **arguments)
        with refused("model", "frozen weights are not those with which the run began"):
            fedspan.predict(folder, ["a1 b2"], model=other, **arguments)


def test_models_that_do_not_fit(tiny_folder: Path, tmp_path: Path, frame: pd.DataFrame) -> None:
    name = str(tiny_folder / "bert")
    values = settings(tiny_folder)

    def require_refusal(field: str, words: str, model: Any, **changes: Any) -> None:
        content = {**values, "model": {"target_modules": ["query"], **changes}}
        with refused(field) as caught:
            fedspan.run(content, tmp_path / "run", data=frame, model=model)
        assert words in str(caught.value)

    require_refusal("model", "AutoModelForSequenceClassification.from_pretrained", AutoModel.from_pretrained(name))
    wrong = AutoModelForSequenceClassification.from_pretrained(name, num_labels=17)
    require_refusal("model", "has 17 outputs where", wrong)
    require_refusal("model.name", "leave model.name out", wrong, name=name)
    require_refusal("model", "a PreTrainedModel of Transformers", object())


class Pooled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.classifier = torch.nn.Linear(18, 12), torch.nn.Linear(12, 3)


def test_a_module_without_a_tokenizer_needs_a_task_of_its_own(tmp_path: Path, frame: pd.DataFrame) -> None:
    values = {"model": {"target_modules": ["query"], "modules_to_save": ["classifier"]}, "device": "cpu"}
    with refused("task"):
        fedspan.run(values, tmp_path / "run", data=frame, model=Pooled())
