"""FLOPs and memory of local training: torch's own counter on real steps of every method, and known formulas."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fedspan
from fedspan import FedspanError
from fedspan.assembly.run import Prepared
from fedspan.core.parametrization import MultiHeadCore
from fedspan.core.tensors import join_tensor_name
from fedspan.core.values import Client, Job
from fedspan.planning.plan import Plan, PlannedModel, plan_run
from helpers import tiny
from helpers.families import UNLIKE, methods_by_family
from helpers.refusals import refused

RANK, BATCH, LENGTH = 3, 8, 11
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
SHORT = {**LLAMA, "num_hidden_layers": 6, "vocab_size": 6000}
"""A fifth of its blocks, and of its head: each block costs the same, and the passes are counted sooner."""


def first_job(prepared: Prepared) -> Job:
    """That of a client in the first round."""
    federation = prepared.federation
    one = next(iter(federation.clients.values())).client
    client = Client(one.id, one.rank, one.scaling, one.examples, one.weight)
    return federation.method.start(
        federation.method.sync(federation.begin().state, client), client, {}, federation.begin().state.round
    )


def counted(prepared: Prepared, job: Job, rows: int, length: int) -> int:
    """FLOPs of a real forward and backward pass, by torch's counter."""
    adapted = prepared.engine.adapted
    adapted.train_mode(job.buffers)
    adapted.install(job.parametrization, job.tensors, frozenset(job.trainable_names))
    ids = torch.ones(rows, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        adapted.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.sum().backward()
    adapted.install({}, {}, frozenset())
    return counter.get_total_flops()


def count_cores(job: Job) -> int:
    """FLOPs of multiplying B with RAVAN's cores, forward and backward: once a step, which a plan leaves out."""
    return sum(
        4 * job.tensors[join_tensor_name(layer, "B")].numel() * job.tensors[join_tensor_name(layer, "R")].shape[-1]
        for layer, form in job.parametrization.items()
        if isinstance(form, MultiHeadCore)
    )


@pytest.mark.parametrize("key", methods_by_family(quick=UNLIKE))
def test_flops_of_a_step_are_those_of_a_real_one(
    key: str, prepared: Prepared, planned: PlannedModel, tiny_folder: Path
) -> None:
    changes = {"training": {"batch_size": BATCH, "gradient_accumulation_steps": 2}}
    config = tiny.config(tiny_folder, method={"name": key, "r": RANK, "lora_alpha": 6}, **changes)
    job = first_job(tiny.variant(prepared, config))
    found = plan_run(config, planned, clients=len(tiny.SITES), length=LENGTH).compute
    real = counted(prepared, job, BATCH, LENGTH)
    assert found.step == 2 * BATCH * found.example
    assert found.example * BATCH == pytest.approx(real - count_cores(job), rel=2e-3)  # but for other work once a step


def llama(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "task": "causal-lm",
        "data": {"train": "unread.jsonl", "prompt": "{text}"},
        "model": {
            "name": "nobody/llama",
            "target_modules": ["q_proj", "v_proj"],
            "max_length": 512,
            "dtype": "bfloat16",
        },
        "partition": {"clients": 1000},
        "federation": {"rounds": 20, "clients_per_round": 50},
        "training": {"local_steps": 10, "batch_size": 4},
    }
    for section, change in changes.items():
        values[section] = {**values.get(section, {}), **change} if isinstance(change, dict) else change
    return values


@pytest.mark.slow
def test_a_thousand_hospitals_with_llama_2_7b_are_planned_without_it() -> None:
    """Kaplan et al. (arXiv:2001.08361): 2 FLOPs a weight and token forwards, and attention beside; of a frozen base as
    much backwards, where whole training takes twice that."""
    found = fedspan.plan(llama(), architecture=LLAMA, device="A100", mbit=100)
    tokens, width, blocks = 512, 4096, 32
    assert found.parameters == 6_738_415_616
    weights = found.parameters - 32000 * width  # the embedding is a look-up
    forward = 2 * weights * tokens + blocks * 4 * tokens**2 * width
    assert found.compute.example == pytest.approx(2 * forward, rel=0.03)
    assert found.compute.step == 4 * found.compute.example
    assert found.compute.client == 10 * found.compute.step
    assert found.compute.run == 20 * 50 * found.compute.client
    assert found.trainable == blocks * 2 * 8 * 2 * width
    assert found.time.client == pytest.approx(found.compute.client / (0.35 * 312e12))
    assert found.transfer == pytest.approx(8 * 2 * 4 * found.trainable / 100e6)
    assert found.time.deployed == pytest.approx(20 * (found.time.client + found.transfer))


@pytest.fixture(scope="module")
def short() -> Plan:
    return fedspan.plan(llama(), architecture=SHORT)


def test_frozen_lower_blocks_are_computed_once_and_have_no_backward(short: Plan) -> None:
    blocks = (short.compute.example / 2) / 6  # all blocks count the same, the head 2 % of them
    upper = {"layers_to_transform": [4, 5]}
    kept = fedspan.plan(llama(model=upper, engine={"prefix_memory": 100.0}), architecture=SHORT, examples=40_000)
    assert kept.compute.once == pytest.approx(4 * blocks, rel=0.05)
    assert kept.compute.example == pytest.approx(2 * 2 * blocks, rel=0.1)
    own = 32  # 40 examples less the validation and test parts
    assert kept.client.cache == own * 512 * 4096 * 2
    # At most all clients are drawn in the end, and each computes its own examples' hidden states once.
    assert 0 < kept.compute.run - 1000 * kept.compute.client <= 1000 * own * kept.compute.once
    for change in ({"prefix_cache": False}, {"prefix_memory": 0.01}):
        again = fedspan.plan(llama(model=upper, engine=change), architecture=SHORT, examples=40_000)
        assert (again.compute.once, again.client.cache) == (0, 0)
        assert again.compute.example == pytest.approx(kept.compute.example + kept.compute.once, rel=1e-3)


def test_recomputed_activations_take_less_memory_and_more_flops(short: Plan) -> None:
    again = fedspan.plan(llama(model={"gradient_checkpointing": True}), architecture=SHORT)
    assert again.client.activations < 0.3 * short.client.activations
    # Three passes in place of two, but that torch ends a block's third with the last activation that is asked for.
    assert 1.35 < again.compute.example / short.compute.example < 1.5


def test_flops_are_of_the_mean_length_and_memory_of_the_greatest(short: Plan) -> None:
    mean = fedspan.plan(llama(), architecture=SHORT, length=128)
    assert (short.compute.length, mean.compute.length) == (512, 128)
    assert 4 < short.compute.example / mean.compute.example < 4.3
    assert short.client == mean.client
    for length in (0, 513):
        with pytest.raises(
            FedspanError, match=rf"^`--length`: {length} is not accepted\. Expected a whole number from 1 to 512"
        ):
            fedspan.plan(llama(), architecture=SHORT, length=length)


def test_packed_batches_are_one_row(short: Plan) -> None:
    one, packed = short.compute, fedspan.plan(llama(data={"packing": True}), architecture=SHORT).compute
    attention = 3 * 6 * 4 * 512**2 * 4096  # of an example, forwards and, both of its factors moving, twice backwards
    assert packed.example == pytest.approx(one.example + 3 * attention, rel=0.01)  # each token meets those of all four


def test_without_examples_or_steps_only_a_step_is_known(planned: PlannedModel, tiny_folder: Path) -> None:
    parts = {"validation": 0.1, "test": 0.1}
    config = tiny.config(tiny_folder, partition=parts, training={"local_steps": None, "local_epochs": 2})
    unknown = plan_run(config, planned, clients=4).compute
    assert (unknown.client, unknown.run) == (None, None)
    known = plan_run(config, planned, clients=4, examples=1000).compute
    assert known.client == 2 * 200 * known.example  # a fifth is for validation and test


@pytest.mark.parametrize(
    ("architecture", "config", "target", "why"),
    [
        (
            {"model_type": "t5", "decoder_start_token_id": 0},
            {"task": "sequence-classification", "data": {"prompt": None, "labels": ["no", "yes"]}},
            "q",
            "unique_consecutive",
        ),
        (
            {"model_type": "mixtral", "num_hidden_layers": 1, "hidden_size": 256, "num_local_experts": 4},
            {},
            "q_proj",
            "BF16",
        ),
    ],
)
def test_a_model_that_asks_for_values_or_another_dtype_is_refused(
    architecture: dict[str, Any], config: dict[str, Any], target: str, why: str
) -> None:
    """T5 looks for the last end-of-text token of a batch; a mixture's fused experts are multiplied in bfloat16."""
    model = {"name": "org/model", "target_modules": [target], "max_length": 64, "dtype": "float32"}
    with pytest.raises(
        FedspanError, match=rf"^`model.name`: 'org/model' is not accepted\. Expected a model that can be planned.*{why}"
    ):
        fedspan.plan(llama(model=model, **config), architecture=architecture)


def test_images_have_no_length() -> None:
    values = {
        "task": "image-classification",
        "data": {"train": "unread"},
        "model": {"name": "builtin:resnet-8", "target_modules": "all-linear", "image_size": 32},
        "training": {"local_steps": 1},
    }
    found = fedspan.plan(values, labels=10)
    assert found.compute.length is None
    assert found.compute.example > 0
    with refused("--length"):
        fedspan.plan(values, labels=10, length=5)
