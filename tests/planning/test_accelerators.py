"""Time by data sheet, and by what this machine does."""

from pathlib import Path
from typing import Any

import pytest

import fedspan
from fedspan import FedspanError
from fedspan.assembly.model import build_empty_model
from fedspan.planning.accelerators import ACCELERATORS, UTILIZATION, DeviceSpeed, get_accelerator_speed
from fedspan.planning.compute import Compute
from helpers import tiny
from helpers.refusals import refused


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
