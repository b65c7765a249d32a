"""What ``fedspan.plan`` fills in."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

import fedspan
from fedspan import FedspanError
from helpers import tiny


def test_the_public_function_fills_in_what_the_catalogue_knows(tiny_folder: Path) -> None:
    values = tiny.settings(tiny_folder)
    values["partition"] = {"clients": 4}
    values["data"] = {"dataset": "sst2", "train": str(tiny_folder / "missing.tsv"), "test": "nowhere.tsv"}
    values["training"] = {"local_epochs": 1, "batch_size": 10}
    found = fedspan.plan(values, overrides=["data.max_examples=500"])
    assert (found.clients, found.steps) == (4, 10)
    # three of 16 x 16 and two of 24 x 16, of rank 2; a head for 2 labels
    assert found.trainable == 2 * (3 * 32 + 2 * 40) + 2 * 17


def test_an_architecture_takes_the_place_of_the_model_s_config(tiny_folder: Path) -> None:
    values = tiny.settings(tiny_folder)
    values["partition"] = {"clients": 4}
    values["model"] = {"name": "nobody/knows-it", "target_modules": ["query"]}
    encoder = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
    found = fedspan.plan(values, architecture={"model_type": "roberta", **encoder}, labels=4)
    assert found.layers == 3
    elsewhere = ["data.train=nowhere.csv"]
    with pytest.raises(FedspanError, match=r"^`data\.labels`: no value is given\. Expected the labels"):
        fedspan.plan(values, architecture={"model_type": "roberta", **encoder}, overrides=elsewhere)
    with pytest.raises(FedspanError, match=r"^`model\.name`: 'nobody/knows-it' cannot be loaded .* Expected a hub id"):
        fedspan.plan(values, labels=4)


def test_what_a_local_file_tells_need_not_be_said(tiny_folder: Path, tmp_path: Path) -> None:
    values = tiny.settings(tiny_folder)  # by site: a natural partition
    run = fedspan.run(values, tmp_path / "run", overrides=["federation.rounds=1"])
    found = fedspan.plan(values, overrides=["federation.rounds=1"])
    expected = fedspan.plan(values, overrides=["federation.rounds=1"], labels=4, clients=4, examples=96)
    assert found == expected
    assert found.clients == len(run.by_client) == 4
    rows = pd.read_csv(values["data"]["train"], dtype=str)
    for site, own in rows.groupby(values["partition"]["column"]):
        own.drop(columns=values["partition"]["column"]).to_csv(tmp_path / f"{site}.csv", index=False)
    each = str(tmp_path / f"{{{values['partition']['column']}}}.csv")
    assert fedspan.plan(values, overrides=["federation.rounds=1", f"data.train={each}"]) == found
    gone = values | {"data": {**values["data"], "train": str(tmp_path / "elsewhere.csv")}}
    with pytest.raises(FedspanError, match=r"`data\.labels`: no value"):
        fedspan.plan(gone)
