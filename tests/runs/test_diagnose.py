"""Which runs can be diagnosed, and with which numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedspan.errors import FedspanError
from fedspan.runs.diagnose import diagnose


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
