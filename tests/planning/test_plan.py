"""What is planned is what a run measures: bytes to the byte, trainable numbers, the base's memory."""

from __future__ import annotations

from pathlib import Path

import pytest

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
        for client_data in run.federation.clients.values():
            job = method.start(
                method.sync(progress.state, client_data.client), client_data.client, {}, progress.state.round
            )
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
