"""FLOPs, memory and time of local training: torch's counter on real steps of every method, and data sheets."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fedspan
from fedspan import FedspanError
from fedspan.assembly.model import build_empty_model
from fedspan.assembly.run import Prepared
from fedspan.core.parametrization import MultiHeadCore
from fedspan.core.tensors import join_tensor_name
from fedspan.core.values import Client, Job
from fedspan.planning.accelerators import ACCELERATORS, UTILIZATION, DeviceSpeed, get_accelerator_speed
from fedspan.planning.compute import Compute
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
    return tiny.change_sections(values, changes)


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


def test_each_text_of_an_example_that_has_a_pass_of_its_own_counts(short: Plan) -> None:
    pairs = fedspan.plan(llama(task="preference", model={"layers_to_transform": [4, 5]}), architecture=SHORT)
    assert pairs.compute.once == 0  # no hidden states are stored
    assert pairs.compute.example == pytest.approx(
        2 * (short.compute.example * 4 / 6), rel=0.1
    )  # 4 blocks have no backward
    texts = {"text": "a", "text_pair": "b"}
    found = [
        fedspan.plan(llama(task="text-embedding", data={**texts, **more}), architecture=SHORT).compute.example
        for more in ({}, {"roles": {"negative": "c"}})
    ]
    assert found[1] == pytest.approx(1.5 * found[0], rel=1e-3)


def test_recomputed_activations_take_less_memory_and_more_flops(short: Plan) -> None:
    again = fedspan.plan(llama(model={"gradient_checkpointing": True}), architecture=SHORT)
    assert again.client.activations < 0.3 * short.client.activations
    # Three passes in place of two, but that torch ends a block's third with the last activation that is asked for.
    assert 1.35 < again.compute.example / short.compute.example < 1.5


def test_flops_are_of_the_mean_length_memory_of_the_greatest_and_packed_batches_one_row(short: Plan) -> None:
    mean = fedspan.plan(llama(), architecture=SHORT, length=128)
    assert (short.compute.length, mean.compute.length) == (512, 128)
    assert 4 < short.compute.example / mean.compute.example < 4.3
    assert short.client == mean.client
    for length in (0, 513):
        with pytest.raises(
            FedspanError, match=rf"^`--length`: {length} is not accepted\. Expected a whole number from 1 to 512"
        ):
            fedspan.plan(llama(), architecture=SHORT, length=length)
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


def compute(**changes: Any) -> Compute:
    values = {"length": 32, "example": 10, "once": 0, "step": 100, "client": 400, "run": 8000}
    values |= {"first": 0, "amortized": 0}
    return Compute(**{**values, **changes})


@pytest.mark.parametrize("name", ["A100", "a100", "rtx 4090", "RTX-4090"])
def test_a_gpu_is_found_however_it_is_written(name: str) -> None:
    found = get_accelerator_speed(name, "bfloat16")
    peak = ACCELERATORS[found.device].bfloat16
    assert found.single == found.parallel == pytest.approx(peak * 1e12 * UTILIZATION)


def test_number_formats_have_rates_of_their_own() -> None:
    for key, one in ACCELERATORS.items():
        assert one.float32 < one.float16
        assert get_accelerator_speed(key, "float32", 1.0).single == one.float32 * 1e12
        assert one.bfloat16 in (None, one.float16)
    for old in ("T4", "V100"):
        with pytest.raises(FedspanError, match=rf"^`--device`: '{old}' is not accepted\. Expected a GPU with bfloat16"):
            get_accelerator_speed(old, "bfloat16")


def test_mistakes_name_what_there_is() -> None:
    with refused("--device"):
        get_accelerator_speed("B1000", "float32")
    for share in (0.0, 1.5):
        with refused("--utilization"):
            get_accelerator_speed("A100", "float32", share)


def test_time_follows_from_flops(tiny_folder: Path) -> None:
    config = tiny.config(tiny_folder, federation={"rounds": 5})
    found = DeviceSpeed("x", single=10.0, parallel=40.0).compute_duration(compute(), 0, config, 3.0)
    assert (found.step, found.client, found.simulated) == (10.0, 40.0, 200.0)
    assert found.deployed == 5 * (40 + 3)
    unknown = DeviceSpeed("x", 10.0, 40.0).compute_duration(compute(client=None, run=None), 0, config, None)
    assert (unknown.step, unknown.client, unknown.simulated, unknown.deployed) == (10.0, None, None, None)


def test_workers_of_a_cluster_divide_the_time_as_far_as_a_round_has_clients(tiny_folder: Path) -> None:
    speed = DeviceSpeed("X", 100.0, 200.0)
    for wanted, used in ((2, 2), (8, 3)):
        config = tiny.config(tiny_folder, cluster={"workers": wanted})
        duration = speed.compute_duration(compute(), 0, config, None)
        assert (duration.workers, duration.simulated) == (used, pytest.approx(8000 / 200 / used))
        assert duration.client == pytest.approx(4.0)  # a client trains on one of them


def test_a_small_batch_waits_for_the_weights(tiny_folder: Path) -> None:
    """Two passes over the weights take longer than the products: a step lasts as long as they do."""
    config = tiny.config(tiny_folder, training={"gradient_accumulation_steps": 3})
    found = DeviceSpeed("x", 10.0, 10.0, bandwidth=2.0).compute_duration(compute(), 50, config, None)
    assert found.step == 3 * 2 * 50 / 2
    assert found.client == pytest.approx(4 * found.step)


def test_what_is_computed_once_is_paid_once_and_its_weights_are_read_once(tiny_folder: Path) -> None:
    """Two clients, five rounds; three quarters of the forward pass lie below what trains."""
    config = tiny.config(tiny_folder, federation={"rounds": 5})
    made = compute(once=15, first=600, amortized=1200, run=1200 + 10 * 400)
    found = DeviceSpeed("x", 10.0, 10.0).compute_duration(made, 0, config, None)
    assert found.simulated == (1200 + 10 * 400) / 10
    assert found.deployed == 60 + 5 * 40
    bound = DeviceSpeed("x", 10.0, 10.0, bandwidth=2.0).compute_duration(made, 80, config, None)
    assert bound.step == 2 * 80 / 4 / 2  # of 80 bytes a quarter, twice
    assert bound.client == pytest.approx(4 * bound.step)
    assert bound.simulated == pytest.approx(10 * 4 * bound.step + 120)
    assert bound.deployed == pytest.approx(60 + 5 * 4 * bound.step)


@pytest.mark.parametrize("engine", [pytest.param("loop", marks=pytest.mark.slow), "batched"])
@pytest.mark.parametrize("kind", ["bert", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_this_machine_is_timed(engine: str, kind: str, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSPAN_CACHE", str(tiny_folder / f"cache-{engine}-{kind}"))
    values = tiny.settings(tiny_folder, kind, engine={"name": engine}, federation={"rounds": 3})
    found = fedspan.plan(values, labels=4, clients=4, device="here", length=7).time
    assert (found.device, found.memory) == ("here", None)
    assert 0 < found.step < found.client < found.simulated + found.client
    if engine == "loop":
        assert (found.start, found.simulated) == (0.0, pytest.approx(3 * 3 * found.client))


@pytest.mark.slow
def test_a_pooled_encoder_is_timed_too(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSPAN_CACHE", str(tiny_folder / "cache-pooled"))
    values = tiny.settings(tiny_folder, model={"pooling": "mean"}, engine={"name": "loop"})
    found = fedspan.plan(values, labels=4, clients=4, device="here", length=7).time
    assert found.step is not None


@pytest.mark.slow
def test_images_are_timed_too() -> None:
    values = {
        "task": "image-classification",
        "device": "cpu",
        "data": {"train": "unread"},
        "model": {"name": "builtin:resnet-8", "target_modules": "all-linear", "image_size": 16},
        "method": {"r": 2},
        "training": {"local_steps": 1, "batch_size": 2},
        "partition": {"clients": 2},
    }
    found = fedspan.plan(values, labels=3, device="here")
    assert found.time.step > 0


def test_a_large_model_is_timed_with_two_of_its_blocks(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedspan.planning.estimate._WHOLE", 0)
    asked: list[int | None] = []

    def watched(config: Any, labels: Any, architecture: Any, device: Any = None, depth: int | None = None) -> Any:
        asked.append(depth)
        return build_empty_model(config, labels, architecture, device, depth)

    monkeypatch.setattr("fedspan.planning.estimate.build_empty_model", watched)
    values = tiny.settings(tiny_folder, model={"layers_to_transform": [3]})
    shape = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 24}
    architecture = {"model_type": "bert", "vocab_size": 100, "max_position_embeddings": 32, **shape}
    values["partition"] = {"clients": 3}
    found = fedspan.plan(values, architecture=architecture, labels=4, device="here").time
    assert asked == [2, 2]
    assert found.step > 0


def test_what_can_not_be_timed(tiny_folder: Path) -> None:
    values = tiny.settings(tiny_folder, model={"quantization": "nf4"})
    with refused("--device"):
        fedspan.plan(values, labels=4, clients=4, device="here")
    for device in (None, "here"):
        with refused("--utilization"):
            fedspan.plan(tiny.settings(tiny_folder), labels=4, clients=4, device=device, utilization=0.5)
    for mbit in (0, -1, float("nan"), float("inf")):
        with refused("--mbit"):
            fedspan.plan(tiny.settings(tiny_folder), labels=4, clients=4, mbit=mbit)
