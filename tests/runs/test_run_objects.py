"""Runs on data, models and tokenizers passed from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from peft import AutoPeftModelForSequenceClassification, PeftConfig
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

import fedspan
from fedspan.errors import FedspanError
from fedspan.runs.callbacks import Listener
from fedspan.runs.integrity import read_config
from fedspan.runs.session import read_partition
from helpers import tiny


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
    with pytest.raises(FedspanError, match="the data of this run were passed from Python: pass them again as data="):
        fedspan.evaluate(tmp_path / "frame")


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


class Stop(Listener):
    def round_finished(self, row: Any) -> None:
        raise KeyboardInterrupt


def test_a_model_is_copied_and_named_and_resume_needs_it_again(
    tiny_folder: Path, tmp_path: Path, frame: pd.DataFrame
) -> None:
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
        fedspan.run(values, tmp_path / "stopped", listener=Stop(), **objects)
    with pytest.raises(FedspanError, match="passed from Python: pass"):
        fedspan.resume(tmp_path / "stopped")
    with pytest.raises(FedspanError, match="the model of this run was passed from Python: pass it again as model="):
        fedspan.resume(tmp_path / "stopped", data=frame)
    fedspan.resume(tmp_path / "stopped", **objects)
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")


def test_models_that_do_not_fit(tiny_folder: Path, tmp_path: Path, frame: pd.DataFrame) -> None:
    name = str(tiny_folder / "bert")
    values = settings(tiny_folder)

    def refused(field: str, words: str, model: Any, **changes: Any) -> None:
        content = {**values, "model": {"target_modules": ["query"], **changes}}
        with pytest.raises(FedspanError) as caught:
            fedspan.run(content, tmp_path / "run", data=frame, model=model)
        assert caught.value.field == field
        assert words in str(caught.value)

    refused("model", "AutoModelForSequenceClassification.from_pretrained", AutoModel.from_pretrained(name))
    wrong = AutoModelForSequenceClassification.from_pretrained(name, num_labels=17)
    refused("model", "has 17 outputs where", wrong)
    refused("model.name", "leave model.name out", wrong, name=name)
    refused("model", "a PreTrainedModel of Transformers", object())
