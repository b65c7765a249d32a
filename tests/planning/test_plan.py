"""What is planned is what a run measures: bytes to the byte, trainable numbers, the base's memory."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

import fedspan
from fedspan import FedspanError
from fedspan.planning.plan import PlannedModel, plan_run, prepare_model
from fedspan.runs.head_setup import begin
from fedspan.runs.setup import Prepared, prepare
from helpers import tiny
from helpers.families import UNLIKE, methods_by_family, others_slow

RANK = 3


def test_an_empty_model_has_the_layers_extras_and_parameters_of_the_loaded_one(
    planned: PlannedModel, prepared: Prepared
) -> None:
    loaded = prepared.engine.adapted
    assert planned.adapted.spec == loaded.spec
    sizes = [sum(p.numel() for p in each.model.parameters()) for each in (planned.adapted, loaded)]
    assert sizes[0] == sizes[1]
    assert planned.base == sum(
        p.numel() * p.element_size() for p in (*loaded.model.parameters(), *loaded.model.buffers())
    )
    assert planned.adapted.device.type == "meta"


@pytest.mark.parametrize("kind", others_slow(["class-means", "lda", "random"], ["lda"]))
def test_the_heads_statistics_are_planned(kind: str, tiny_folder: Path) -> None:
    config = tiny.config(tiny_folder, model={"head_init": kind})
    prepared = prepare(config)
    begin(prepared.federation, prepared.head)
    up = {one.payload for one in prepared.federation.pop_events().transfers if one.direction == "up"}
    planned = plan_run(config, prepare_model(config, len(tiny.LABELS)), clients=len(tiny.SITES))
    assert (up or {0}) == {planned.head_up}


@pytest.mark.parametrize("key", methods_by_family(quick=UNLIKE))
def test_what_trains_is_what_moves(key: str, prepared: Prepared, planned: PlannedModel, tiny_folder: Path) -> None:
    """The largest number of elements that any job of the first two rounds moves (a probing first round aside)."""
    config = tiny.config(tiny_folder, method={"name": key, "r": RANK, "lora_alpha": 6})
    plan = plan_run(config, planned, clients=len(tiny.SITES))
    run = tiny.variant(prepared, config)
    method, progress, most = run.federation.method, run.federation.begin(), 0
    for _ in range(2):
        for member in run.federation.clients.values():
            job = method.start(method.sync(progress.state, member.client), member.client, {}, progress.state.round)
            most = max(most, sum(job.tensors[name].numel() for name in job.trainable_names))
        progress = run.federation.run_round(progress).progress
    assert plan.trainable >= most - sum(p.numel() for p in planned.adapted.extras.values())
    assert plan.trainable <= plan.parameters
    assert plan.client.gradients == 4 * plan.trainable
    assert plan.client.total > plan.client.base == planned.base


def test_steps_follow_from_examples_or_are_given(planned: PlannedModel, tiny_folder: Path) -> None:
    config = tiny.config(tiny_folder)
    assert plan_run(config, planned, clients=4).all_steps == 2 * 3 * 2
    partition = {"validation": 0.1, "test": 0.1}
    epochs = tiny.config(tiny_folder, partition=partition, training={"local_steps": None, "local_epochs": 2})
    assert plan_run(epochs, planned, clients=4).steps is None
    assert plan_run(epochs, planned, clients=4, examples=200).steps == 2 * 10


def test_a_natural_partition_needs_the_number_of_clients(planned: PlannedModel, tiny_folder: Path) -> None:
    with pytest.raises(
        FedspanError, match=r"^`clients`: no value is given\. Expected the number of values of partition\.column"
    ):
        plan_run(tiny.config(tiny_folder), planned)


def test_narrow_and_quantized_bases_take_less(planned: PlannedModel, tiny_folder: Path) -> None:
    half = prepare_model(tiny.config(tiny_folder, model={"dtype": "bfloat16"}), len(tiny.LABELS))
    quarter = prepare_model(tiny.config(tiny_folder, model={"quantization": "nf4"}), len(tiny.LABELS))
    assert quarter.base < planned.base
    assert half.base < 0.7 * planned.base
    config = tiny.config(tiny_folder)
    kept = [plan_run(config, each, clients=4).client.activations for each in (half, planned)]
    assert kept[0] < kept[1]


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
