"""A trainer in two processes (DDP and FSDP2 over gloo): equal to one, what ends both; and settings that are refused."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import distributed, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import PreTrainedModel, Trainer

import fedspan
from fedspan.assembly.federation import build_simulated_federation
from fedspan.assembly.own_trainers import TrainerRuns, adopt_trainer
from fedspan.core.base import BaseUpdate
from fedspan.core.lowrank import LowRank
from fedspan.core.parametrization import FactorizedConv, LoRA, MixedGram
from fedspan.core.values import Group, Job
from fedspan.data.files import FROM_TRAINERS
from fedspan.federation.evaluation import ReportedEvaluator
from fedspan.tasks.trainer import TrainerExamples
from fedspan.training.trainers.processes import Processes, describe_job, read_job
from helpers import tiny, two_processes
from helpers.ports import free_port
from helpers.refusals import refused
from helpers.trainer_clients import make_trainer, site_rows

ROOT = Path(__file__).resolve().parents[3]
DEADLINE = 240


def environment(rank: int, port: int) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    values = {key: str(value) for key, value in world.items()}
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **values}


def run_two(*arguments: object) -> list[tuple[int, str]]:
    """Run ``helpers.two_processes`` twice; the exit status and output of each rank."""
    port = free_port()
    command = [sys.executable, "-m", "helpers.two_processes", *map(str, arguments)]
    started = [
        subprocess.Popen(
            command, env=environment(rank, port), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=DEADLINE)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, output) for process, output in zip(started, outputs, strict=True)]


def assert_equal_tensors(one: Path, other: Path) -> None:
    expected, found = load_file(one), load_file(other)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name


def compare(
    tiny_folder: Path, folder: Path, method: str, *options: object, sentences: bool = False, rtol: float = 1e-3
) -> list[str]:
    """Check that two processes end as one does, in every round and after evaluations; the names of what ended.

    Without dropout, whose masks are drawn by process.
    """
    one, two = folder / "one", folder / "two"
    one.mkdir()
    two.mkdir()
    run = two_processes.simulate_sentences if sentences else two_processes.serve
    run(tiny_folder, one, {"name": method})
    for status, output in run_two(tiny_folder, two, method, *(["--sentences"] if sentences else []), *options):
        assert status == 0, output
    expected, found = load_file(one / "result-0.safetensors"), load_file(two / "result-0.safetensors")
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.allclose(value, found[name], rtol=rtol, atol=rtol / 100), name
    return list(expected)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["rolora", "fedex-lora"])
def test_two_processes_train_what_one_trains(method: str, tiny_folder: Path, tmp_path: Path) -> None:
    compare(tiny_folder, tmp_path, method)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "more"), [("rolora", ()), ("flora", ("--checkpointing",))])
def test_two_processes_that_shard_the_base_train_what_one_trains(
    method: str, more: tuple[str, ...], tiny_folder: Path, tmp_path: Path
) -> None:
    """Also in a second run; FLoRA changes the base, of which each process has a half (FSDP2)."""
    names = compare(tiny_folder, tmp_path, method, "--fsdp", "--runs", 2, *more)
    assert any(name.startswith("base/") for name in names) == (method == "flora")
    two = tmp_path / "two"
    assert_equal_tensors(two / "result-0.safetensors", two / "result-1.safetensors")
    for rank in range(2):
        held, whole = json.loads((two / f"bytes-{rank}.json").read_text())
        assert 0.45 * whole < held < 0.55 * whole


@pytest.mark.slow
def test_two_processes_train_a_sentence_encoder_as_one_does(tiny_folder: Path, tmp_path: Path) -> None:
    """Its trainer leaves the round's wrapper (DDP) in the loss."""
    compare(tiny_folder, tmp_path, "fedit", sentences=True, rtol=1e-4)


@pytest.mark.slow
def test_processes_draw_dropout_of_their_own_and_a_second_run_has_the_same_bits(
    tiny_folder: Path, tmp_path: Path
) -> None:
    for status, output in run_two(tiny_folder, tmp_path, "fedit", "--dropout", 0.3, "--runs", 2):
        assert status == 0, output
    assert_equal_tensors(tmp_path / "result-0.safetensors", tmp_path / "result-1.safetensors")
    first, second = (load_file(tmp_path / f"draws-{rank}.safetensors") for rank in range(2))
    passes = len(first) // 2
    assert passes == 2 * 2 * 8 // two_processes.GLOBAL_BATCH  # runs, rounds, examples
    for at in range(passes):
        length = min(len(first[f"mask/{at}"]), len(second[f"mask/{at}"]))
        masks = first[f"mask/{at}"][:length], second[f"mask/{at}"][:length]
        assert not torch.equal(*masks)
        assert 0.6 < float(masks[1].float().mean()) < 0.8
    steps = passes // 4
    rows = [row[row != 0].tolist() for draws in (first, second) for at in range(steps) for row in draws[f"inputs/{at}"]]
    assert sorted(rows) == sorted(
        site_rows(tiny_folder, "east")[1].select(range(8))["input_ids"]
    )  # each example once in an epoch


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "more"), [(0, ()), (1, ()), (1, ("--fsdp",))])
def test_a_process_that_fails_ends_both_with_the_reason(
    rank: int, more: tuple[str, ...], tiny_folder: Path, tmp_path: Path
) -> None:
    results = run_two(tiny_folder, tmp_path, "fedit", "--fail", rank, *more)
    assert all(status != 0 for status, _ in results), results
    assert "the disk of this process is full" in results[rank][1]
    assert "all processes of this client end. Start the script again" in results[0][1]
    assert not (tmp_path / "result-0.safetensors").exists()


@pytest.mark.slow
def test_an_interrupt_of_rank_0_within_a_round_ends_both(tiny_folder: Path, tmp_path: Path) -> None:
    (first, output), (second, other) = run_two(tiny_folder, tmp_path, "fedit", "--interrupt")
    assert first != 0
    assert "KeyboardInterrupt" in output
    assert second != 0
    assert "another process ended" in other


@pytest.mark.slow
def test_processes_with_other_numbers_of_examples_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    for _, output in run_two(tiny_folder, tmp_path, "fedit", "--fewer"):
        assert "its processes have 5 to 8 training examples" in output
    assert not (tmp_path / "result-0.safetensors").exists()


@pytest.fixture
def alone() -> Iterator[Processes]:
    """The processes of a group of one."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield Processes()
    finally:
        distributed.destroy_process_group()


def test_an_interrupt_leaves_the_task_unfinished_and_the_others_get_no_further_one(
    alone: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced: list[str] = []
    inner = alone.announce
    monkeypatch.setattr(alone, "announce", lambda task, *rest, **header: [announced.append(task), inner(task, *rest)])
    job = Job({}, {}, (), steps=1)
    alone.announce_job("train", job, BaseUpdate())
    with alone.run_together():
        assert alone.is_busy
    assert not alone.is_busy
    alone.announce_job("train", job, BaseUpdate())
    with pytest.raises(KeyboardInterrupt), alone.run_together():
        raise KeyboardInterrupt
    alone.close()
    assert announced == ["train", "train"]
    with refused("trainer", "the last task was interrupted"):
        alone.announce_job("train", job, BaseUpdate())
    announced.pop()
    alone.finish()
    alone.close()
    assert announced == ["train", "train", "end"]


def test_only_rank_0_refuses_an_evaluation_without_the_metric(alone: Processes, tiny_folder: Path) -> None:
    adopted = {"east": adopt_trainer(make_trainer(tiny_folder, "east"))}
    values = {
        "model": {"name": str(tiny_folder / "bert"), "target_modules": tiny.BERT},
        "method": {"name": "fedit", "r": 2},
        "evaluation": {"metric": "accuracy"},
        "task": "trainer",
        "data": {"train": FROM_TRAINERS},
        "partition": {"partitioner": "natural", "column": "owner"},
    }
    with closing(TrainerRuns(adopted, alone)) as runs:
        local = runs.load_announced(json.dumps(values))
        federation = build_simulated_federation(local, local.clients, local.train, None)
        job = ReportedEvaluator(federation, 1, None).build_job(federation.begin(), None)
        engine, rows = local.engine, np.arange(8, 11)
        with refused("evaluation.metric"):
            engine.evaluate("east", job, TrainerExamples(0), rows, 1)
        assert alone.failure is None
        assert not alone.is_busy
        alone.rank = 1
        assert "loss" in engine.evaluate("east", job, TrainerExamples(0), rows, 1)


class OwnForm:
    """A parametrization of a user's own."""


def test_jobs_that_the_other_processes_cannot_train_are_refused_before_anything_is_sent(alone: Processes) -> None:
    with refused("trainer", r"decays the frozen base"):
        alone.announce_job("train", Job({}, {}, (), decay_base=True), BaseUpdate())
    with refused("trainer", r"parametrization of a\.b is a class of your own"):
        alone.announce_job("train", Job({"a.b": OwnForm()}, {}, ()), BaseUpdate())
    assert not alone.is_busy


def test_a_number_for_another_purpose_is_refused(alone: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    assert alone.collect(2.5, "loss") == [2.5]

    def answer_otherwise(found: list[torch.Tensor], own: torch.Tensor, group: object) -> None:
        found[0].copy_(own + 1)

    monkeypatch.setattr(distributed, "all_gather", answer_otherwise)
    with refused("trainer", r"process 0 was at 'loss' and another process was not"):
        alone.sum(1, "loss")
    assert alone.failure is not None


def test_a_simulation_in_several_processes_is_refused(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tiny_folder, "east")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refused("trainers", r"in 2 processes, and fedspan\.simulate runs a federation in one"):
        fedspan.simulate({}, tmp_path / "run", trainers={"east": trainer})


def test_a_trainer_of_one_process_in_a_script_of_two_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refused("trainer", "runs in 2 processes, and its trainer in one of them only"):
        Processes()


def test_a_job_is_read_as_it_was_described() -> None:
    torch.manual_seed(0)
    forms = {"a.b": LoRA(0.5), "conv": FactorizedConv((3, 1)), "mixed": MixedGram(2.0, "left")}
    tensors = {"a.b/A": torch.randn(2, 5), "a.b/B": torch.randn(3, 2).bfloat16(), "conv/U": torch.tensor(1.5)}
    job = Job(forms, tensors, (Group(("a.b/A",)), Group(("a.b/B",), 2.0)), steps=0, epochs=3, phase="probe")
    pair = LowRank(torch.randn(3, 2), torch.randn(2, 5), 0.25)
    base = BaseUpdate(4, 0.5, {"a.b": pair, "conv": torch.randn(2, 3)})
    header, sent = describe_job(job, base)
    found, moved = read_job((json.loads(json.dumps(header)), sent), BaseUpdate())
    assert found.parametrization == forms
    assert all(torch.equal(value, found.tensors[name]) for name, value in tensors.items())
    assert (found.trainable_names, found.steps, found.epochs, found.phase) == (("a.b/A", "a.b/B"), 0, 3, "probe")
    assert (moved.round, moved.rho) == (4, 0.5)
    restored = moved.total["a.b"]
    assert isinstance(restored, LowRank)
    assert torch.equal(restored.to_dense(), pair.to_dense())
    assert read_job(describe_job(job, None), moved)[1] is moved


PLUGIN = "accelerator.state.fsdp_plugin"


@pytest.fixture
def trainer(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """A trainer that seems to train with FSDP2 in two processes."""
    made = make_trainer(tiny_folder, "east")
    monkeypatch.setattr(type(made.args), "world_size", 2)
    plugin = SimpleNamespace(
        fsdp_version=2, activation_checkpointing=False, cpu_ram_efficient_loading=False, cpu_offload=None
    )
    state: Any = SimpleNamespace(fsdp_plugin=plugin)
    made.accelerator = SimpleNamespace(state=state, mixed_precision="no", torch_device_mesh=None)
    made.is_fsdp_enabled = True
    return made


def refuse(trainer: Trainer, match: str) -> None:
    with pytest.raises(fedspan.FedspanError, match=match):
        adopt_trainer(trainer)


def test_fsdp2_is_accepted(trainer: Trainer) -> None:
    adopt_trainer(trainer)


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        ("is_deepspeed_enabled", True, "DeepSpeed takes model and optimizer into an engine of its own"),
        ("is_fsdp_xla_enabled", True, "FSDP on XLA"),
        (f"{PLUGIN}.fsdp_version", 1, r"FSDP1 flattens parameters into one.*fsdp_config=\{'version': 2\}"),
        (f"{PLUGIN}.activation_checkpointing", True, "activation_checkpointing renames modules"),
        (f"{PLUGIN}.cpu_ram_efficient_loading", True, "leaves the other processes without weights"),
        (f"{PLUGIN}.cpu_offload", CPUOffloadPolicy(), "cpu_offload stores weights on another device"),
        pytest.param(
            *("model._is_distributed_loading_by_transformers", True, r"\(distributed_config=\.\.\.\) has sharded its"),
            marks=pytest.mark.skipif(
                not hasattr(PreTrainedModel, "is_distributed_loading_by_transformers"),
                reason="this Transformers shards no model when it loads it",
            ),
        ),
    ],
)
def test_what_a_round_cannot_honor_is_refused(path: str, value: object, match: str, trainer: Trainer) -> None:
    *parents, name = path.split(".")
    setattr(functools.reduce(getattr, parents, trainer), name, value)
    refuse(trainer, match)


def test_models_that_fsdp_cannot_shard_are_refused(trainer: Trainer) -> None:
    trainer.accelerator.torch_device_mesh = object()
    refuse(trainer, "together with a parallelism_config")
    trainer.model.hf_quantizer = object()
    refuse(trainer, "not supported for a quantized model")
    trainer.ref_model = nn.Linear(1, 1)
    refuse(trainer, "not supported with a reference model")


def test_arguments_that_a_round_with_fsdp_cannot_honor_are_refused(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.args.torch_compile = True
    refuse(trainer, "torch_compile is not supported with FSDP2")
    trainer.args.save_strategy = "steps"
    refuse(trainer, "Set save_strategy='no'")
    trainer.args.fp16 = True
    refuse(trainer, "fp16 with FSDP2 skips steps by process")
    monkeypatch.setattr(type(trainer.args), "world_size", 1)
    refuse(trainer, "the script runs in one. Start it with torchrun")
