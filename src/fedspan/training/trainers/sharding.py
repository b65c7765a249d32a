"""Sharding of the frozen weights of a user's ``Trainer`` over its processes (FSDP2), and the settings it refuses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from torch import nn
from transformers import Trainer

from fedspan.errors import FedspanError
from fedspan.models.sharded import shard


def explain_refused_sharding(trainer: Trainer) -> str | None:
    """Return why a round cannot train with a trainer's DeepSpeed or FSDP; None: it can, or the trainer has neither."""
    if trainer.is_deepspeed_enabled:
        return (
            "DeepSpeed takes model and optimizer into an engine of its own, which knows neither a round's parameters "
            "nor its optimizer. FSDP2 shards the frozen weights (fsdp=True)"
        )
    if trainer.is_fsdp_xla_enabled:
        return "FSDP on XLA is not supported. FSDP2 of torch is (fsdp=True without fsdp_config['xla'])"
    model: Any = trainer.model
    if getattr(model, "is_distributed_loading_by_transformers", False):
        return (
            "from_pretrained(distributed_config=...) has sharded its model, and the run decides later which parameters "
            "train and stay whole. Load the model without it, and set fsdp=True"
        )
    return _explain_refused_fsdp(trainer, model) if trainer.is_fsdp_enabled else None


def _explain_refused_fsdp(trainer: Trainer, model: Any) -> str | None:
    from torch.distributed.fsdp import CPUOffloadPolicy  # takes a second to import

    plugin: Any = trainer.accelerator.state.fsdp_plugin
    args = trainer.args
    if plugin.fsdp_version != 2:
        return (
            "FSDP1 flattens parameters into one, and a round has parameters of its own in the same layers. Set "
            "fsdp_config={'version': 2}"
        )
    refusals = {
        "FSDP2 shards over several processes, and the script runs in one. Start it with torchrun, or leave fsdp "
        "out": args.world_size == 1,
        "FSDP2 is not supported for a module around the Transformers model (sentence-transformers)": isinstance(
            getattr(model, "transformers_model", None), nn.Module
        ),
        "FSDP2 is not supported with a reference model (ref_model), which TRL shards by itself": (
            getattr(trainer, "ref_model", None) is not None
        ),
        "FSDP2 is not supported for a quantized model": getattr(model, "hf_quantizer", None) is not None,
        "fsdp_config's activation_checkpointing renames modules. Set that of the arguments instead "
        "(activation_checkpointing=True, or gradient_checkpointing=True)": bool(plugin.activation_checkpointing),
        "cpu_ram_efficient_loading leaves the other processes without weights, which each process shards for itself. "
        "Leave it out": bool(plugin.cpu_ram_efficient_loading),
        "FSDP2's cpu_offload stores weights on another device than the round's parameters. Leave it out": (
            isinstance(plugin.cpu_offload, CPUOffloadPolicy)
        ),
        "fp16 with FSDP2 skips steps by process. Use bf16": args.fp16 or trainer.accelerator.mixed_precision == "fp16",
        "a checkpoint within a round would gather sharded weights and an optimizer state that it does not know. Set "
        "save_strategy='no': the run stores its own state": args.save_strategy != "no",
        "torch_compile is not supported with FSDP2": bool(args.torch_compile),
        "FSDP2 is not supported together with a parallelism_config": (
            getattr(trainer.accelerator, "torch_device_mesh", None) is not None  # Accelerate before 1.10 has none
        ),
    }
    return next((reason for reason, holds in refusals.items() if holds), None)


def shard_base(trainer: Trainer, replicated: Iterable[nn.Parameter]) -> None:
    """Shard the frozen weights of a trainer's model over its processes, with the blocks that its fsdp_config names.

    Accelerate's own function cannot be used: it would shard the parameters that train too, and fails on models whose
    embeddings are a block (BERT). Its ``prepare`` accepts a model that is already sharded.

    Args:
        trainer: The trainer, for which ``explain_refused_sharding`` has no reason.

    Raises:
        FedspanError: If the model has no block of a class that ``fsdp_config`` names.
    """
    assert isinstance(trainer.model, nn.Module)
    plugin: Any = trainer.accelerator.state.fsdp_plugin
    try:
        plugin.set_auto_wrap_policy(trainer.model)
    except ValueError as error:
        expected = "classes of the model's blocks"
        raise FedspanError(
            "trainer", "fsdp_config", expected, problem=f"FSDP2 finds no such blocks ({error})"
        ) from error
    is_block = fsdp2_prepare_auto_wrap_policy(plugin, trainer.model)
    shard(trainer.model, replicated, is_block or (lambda module: False), trainer.accelerator.device)
