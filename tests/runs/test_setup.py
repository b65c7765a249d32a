"""The construction of a run from its config: the parts of the held-out examples, and what data and partition refuse."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset

from fedspan import FedspanError
from fedspan.config import parse_config
from fedspan.runs.setup import _find_test_parts, prepare
from helpers import tiny


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
    with pytest.raises(FedspanError, match=r"`evaluation\.by`: there is no test set"):
        prepare(parse_config(settings))
