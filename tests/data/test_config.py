"""Which settings of the data are refused before anything is read, and in which words."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError

from fedspan.data import DataConfig, PartitionConfig


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"text": "a", "label": "a"}, "'a' is also the column of text"),
        ({"text": "a", "text_pair": "a"}, "'a' is also the column of text"),
        ({"labels": ["x", "y"], "first_labels": 2}, "labels already selects the labels"),
        ({"keep_only": True}, "set `data.labels` to the labels to keep"),
        ({"labels": ["x", "y", "x"]}, "each name once; repeated: x"),
        ({"columns": ["x", "x"]}, "each name once; repeated: x"),
        ({"labels": ["x"]}, "at least 2"),
        ({"first_labels": 1}, "greater than or equal to 2"),
        ({"max_examples": 0}, "greater than or equal to 2"),
        ({"test_fraction": 1.0}, "less than 1"),
        ({"tset": "x.csv"}, "Extra inputs"),
        ({"train": ""}, "at least 1 character"),
    ],
)
def test_data_settings_that_contradict_each_other_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        DataConfig.model_validate({"train": "x.csv", **settings})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"partitioner": "natural"}, "natural needs it"),
        ({"validation": 0.5, "test": 0.5}, "sum to 1, which leaves nothing for training"),
        ({"alpha": 0}, "greater than 0"),
        ({"alpha": float("inf")}, "finite"),
        ({"clients": 0}, "greater than or equal to 1"),
        ({"min_examples": 0}, "greater than or equal to 1"),
        ({"classes_per_client": 0}, "greater than or equal to 1"),
        ({"validation": -0.1}, "greater than or equal to 0"),
        ({"partitioner": "shards"}, "'iid', 'dirichlet'"),
        ({"quantity": "cubic"}, "'linear', 'square'"),
    ],
)
def test_partition_settings_that_contradict_each_other_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        PartitionConfig.model_validate(settings)


def test_labels_given_as_numbers_or_bools_are_names_as_in_files() -> None:
    assert DataConfig.model_validate({"train": "x.csv", "labels": [0, 1, True]}).labels == ["0", "1", "True"]


@pytest.mark.parametrize("model", [DataConfig, PartitionConfig])
def test_every_setting_is_described(model: type[BaseModel]) -> None:
    assert [name for name, info in model.model_fields.items() if not info.description] == []


def test_settings_are_frozen_and_survive_a_round_trip() -> None:
    config = PartitionConfig(partitioner="natural", column="ward")
    with pytest.raises(ValidationError, match="frozen"):
        config.clients = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert PartitionConfig.model_validate_json(config.model_dump_json()) == config
