"""The text of a starter config: YAML of a valid run, with the layers of the model that it suggests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedspan.config import parse_config
from fedspan.config.column_inference import InferredData
from fedspan.config.starter_template import get_default_model, render_config, suggest_target_modules
from fedspan.errors import FedspanError
from fedspan.tasks.registry import TASKS


def rendered(task: str = "sequence-classification", by: str | None = None, **changes: Any) -> dict[str, Any]:
    options = {"model": "a/model", "targets": None, "method": "fedit", "is_small": False, **changes}
    data = {"train": "notes: of #1.csv", "text": "té xt"}
    text = render_config(InferredData(task, data, by, ()), data, 7, **options)
    values = yaml.safe_load(text)
    parse_config(values)
    assert values["data"] == data
    return values


def test_rows_are_drawn_or_assigned_by_a_column() -> None:
    assert rendered()["partition"] == {"partitioner": "iid", "clients": 7, "validation": 0.1, "test": 0.1}
    by = rendered(by="site: a #1")["partition"]
    assert by == {"partitioner": "natural", "column": "site: a #1", "validation": 0.1, "test": 0.1}
    assert rendered(is_small=True)["partition"]["validation"] == 0.2


def test_the_model_its_layers_and_the_method_are_those_requested() -> None:
    values = rendered(model="no", targets="[query, value]", method="fedavg")
    assert values["model"] == {"name": "no", "target_modules": ["query", "value"]}
    assert values["method"]["name"] == "fedavg"
    assert rendered()["model"] == {"name": "a/model"}
    assert rendered(model="builtin:all-minilm-l6-v2")["model"]["layers_to_transform"] == [4, 5]


@pytest.mark.parametrize("task", ["sequence-classification", "causal-lm", "regression"])
def test_logits_are_adjusted_where_the_task_can(task: str) -> None:
    adjusted = "logit_adjustment" in rendered(task)["training"]
    assert adjusted is ("logit_adjustment" in TASKS[task].loss_options)


def test_a_task_without_a_model_to_suggest_asks_for_one() -> None:
    assert get_default_model("sequence-classification") == TASKS["sequence-classification"].default_model
    without = [name for name, task in TASKS.items() if task.default_model is None]
    for name in without:
        with pytest.raises(FedspanError, match=f"{name} has no default model") as caught:
            get_default_model(name)
        assert caught.value.field == "--model"
    assert without


def test_layers_are_suggested_where_peft_has_no_default(tmp_path: Path) -> None:
    task = "image-classification"
    assert suggest_target_modules(task, None) == get_default_model(task)[1]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mobilenet_v2"}))
    assert "1x1" in str(suggest_target_modules(task, str(tmp_path)))
    (tmp_path / "config.json").write_text("{")
    assert suggest_target_modules(task, str(tmp_path)) is None  # plan and run say why it cannot be read
    assert suggest_target_modules(task, str(tmp_path / "missing")) is None
