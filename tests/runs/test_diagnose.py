"""Which runs can be diagnosed, and with which numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedspan.config import parse_config
from fedspan.errors import FedspanError
from fedspan.runs.diagnose import diagnose
from fedspan.runs.folder import RunFolder
from fedspan.runs.integrity import format_config


@pytest.mark.parametrize(
    ("arguments", "field", "least"),
    [
        ({"pairs": -1}, "pairs", 0),
        ({"pairs": True}, "pairs", 0),
        ({"pairs": 1.5}, "pairs", 0),
        ({"examples": 0}, "examples", 1),
        ({"examples": "5"}, "examples", 1),
    ],
)
def test_numbers_are_whole_and_not_negative(arguments: dict[str, Any], field: str, least: int, tmp_path: Path) -> None:
    with pytest.raises(FedspanError, match=f"a whole number from {least}") as caught:
        diagnose(tmp_path, **arguments)
    assert (caught.value.field, caught.value.value) == (field, arguments[field])


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(FedspanError, match="holds no run"):
        diagnose(tmp_path)
    with pytest.raises(FedspanError, match="there is no folder"):
        diagnose(tmp_path / "missing")


def test_the_data_of_a_deployment_are_elsewhere(tmp_path: Path) -> None:
    RunFolder(tmp_path).config.write_text(format_config(parse_config({"data": {"train": "train.csv"}})))
    with pytest.raises(FedspanError, match="the data of this run's clients are on other machines"):
        diagnose(tmp_path)
