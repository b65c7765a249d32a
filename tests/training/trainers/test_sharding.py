"""Settings of DeepSpeed and FSDP that are refused; training with FSDP2 is in test_processes.py."""

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import PreTrainedModel, Trainer

import fedspan
from fedspan.assembly.own_trainers import adopt_trainer
from helpers.trainer_clients import make_trainer

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
