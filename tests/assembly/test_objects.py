"""Runs on data, models and tokenizers passed from Python."""

import copy
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from click.testing import CliRunner
from peft import AutoPeftModelForSequenceClassification, PeftConfig
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

import fedspan
from fedspan.errors import FedspanError
from fedspan.runs.integrity import read_config
from fedspan.runs.report import read_partition
from helpers import tiny
from helpers.command_line import get_program
from helpers.listeners import Notes
from helpers.refusals import refused


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
    with pytest.raises(FedspanError, match=r"pass them again as run_data= of fedspan\.evaluate"):
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
    with pytest.raises(FedspanError, match="the data were passed by client, which is their partition"):
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
    with pytest.raises(FedspanError, match="passed from Python: pass"):
        fedspan.resume(tmp_path / "stopped")
    with pytest.raises(FedspanError, match="the model of this run was passed from Python: pass it again as model="):
        fedspan.resume(tmp_path / "stopped", data=frame)
    changed = AutoModelForSequenceClassification.from_pretrained(name, num_labels=labels)
    with torch.no_grad():
        changed.bert.embeddings.word_embeddings.weight[0, 0] += 1
    with refused("model"):
        fedspan.resume(tmp_path / "stopped", **{**objects, "model": changed})
    place = tmp_path / "stopped" / "config.yaml"
    text = place.read_text()
    place.write_text(yaml.safe_dump({**yaml.safe_load(text), "cluster": {"workers": 2}}, explicit_end=True))
    with pytest.raises(FedspanError, match="only data can be passed to a run on a cluster"):
        fedspan.resume(tmp_path / "stopped", **objects)
    place.write_text(text)
    report = fedspan.resume(tmp_path / "stopped", **objects)
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")

    other = 3 - report.best_round  # of two rounds, the one that the run did not export

    def export(run: Path, **given: Any) -> Path:
        return fedspan.export(run, tmp_path / "other", round=other, **given)

    for call in (fedspan.diagnose, export):
        with pytest.raises(FedspanError, match="the data of this run were passed from Python: pass them again as data"):
            call(tmp_path / "stopped")
        with pytest.raises(FedspanError, match="the model of this run was passed from Python: pass it again as model="):
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
        with pytest.raises(FedspanError, match="a BertForSequenceClassification that was passed from Python: pass"):
            fedspan.predict(folder, ["a1 b2"], **arguments)
        with pytest.raises(FedspanError, match="frozen weights are not those with which the run began"):
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
