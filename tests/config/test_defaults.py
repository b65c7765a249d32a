"""What a known data set implies for a run that leaves it out: its task, metric and what counts of an answer."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from fedspan.config import parse_config
from fedspan.data import DataConfig
from fedspan.data.catalogue import DatasetEntry, list_datasets
from fedspan.errors import FedspanError

ENTRIES = {entry.key: entry for entry in list_datasets()}


TEXTS = {key: entry for key, entry in ENTRIES.items() if entry.task != "image-classification"}


EVERY_TEXT = pytest.mark.parametrize("entry", TEXTS.values(), ids=list(TEXTS))


@EVERY_TEXT
def test_a_run_takes_task_metric_and_answers_from_the_data_set(entry: DatasetEntry) -> None:
    config = parse_config({"data": {"dataset": entry.key}})
    assert config.task == entry.task
    assert config.evaluation.metric == (None if entry.metric == "exact_match" else entry.metric)
    assert config.evaluation.answer_pattern == entry.answer_pattern
    assert config.evaluation.max_new_tokens == (entry.max_new_tokens or 64)
    assert config.data.prompt == entry.prompt
    text = yaml.safe_dump(config.model_dump(mode="json"))
    again = parse_config(yaml.safe_load(text))
    assert again == config
    assert again.data.model_fields_set == config.data.model_fields_set


def test_a_run_s_own_words_win_over_the_data_set_s() -> None:
    evaluation = {"metric": "accuracy", "max_new_tokens": 7}
    config = parse_config({"data": {"dataset": "cola"}, "evaluation": evaluation})
    assert (config.evaluation.metric, config.evaluation.max_new_tokens) == ("accuracy", 7)
    config = parse_config({"data": DataConfig(dataset="gsm8k", prompt="{question}"), "evaluation": {"metric": "loss"}})
    assert (config.task, config.data.prompt, config.evaluation.metric) == ("causal-lm", "{question}", "loss")
    assert parse_config({"data": DataConfig(dataset="gsm8k")}).data.prompt == "question"


@pytest.mark.parametrize(
    ("values", "field", "words"),
    [
        ({"task": "regression", "data": {"dataset": "sst2"}}, "task", ["sequence-classification", "sst2"]),
        ({"task": "poetry", "data": {"dataset": "sst2"}}, "task", ["poetry"]),
        ({"task": "regression", "data": {"dataset": "cifar10"}}, "task", ["image-classification"]),
        ({"data": {"dataset": "sst"}}, "data.dataset", ["Did you mean 'sst2'"]),
        ({"data": {"dataset": 3}}, "data.dataset", ["string"]),
        ({"data": {"max_examples": 3}}, "data.train", ["a file or a hub id, or data.dataset"]),
        ({"data": {"dataset": "sst2"}, "evaluation": 3}, "evaluation", []),
        ({"data": {"dataset": "sst2"}, "evaluation": {"metric": "pearson"}}, "evaluation.metric", ["pearson"]),
    ],
)  # fmt: skip
def test_mistakes_of_a_run_are_named(values: dict[str, Any], field: str, words: list[str]) -> None:
    with pytest.raises(FedspanError) as caught:
        parse_config(values)
    assert caught.value.field == field
    assert [word for word in words if word not in str(caught.value)] == []
