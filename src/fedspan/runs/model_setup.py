"""The model of a run: loaded from the config, with its target layers and the adapter that it starts from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft import LoraConfig
from torch import nn

from fedspan.config import RunConfig
from fedspan.core.lowrank import LowRank
from fedspan.errors import FedspanError
from fedspan.models.adapted import AdaptedModel
from fedspan.models.empty import META, load_empty
from fedspan.models.export import read_adapter
from fedspan.models.loading import Loaded, Processor, load_pretrained, load_scratch
from fedspan.models.names import published_name
from fedspan.models.targets import find_buffers, find_extras, find_rest, find_targets
from fedspan.runs.task_setup import PROBLEMS, require_packing

__all__ = ["RunModel", "build_model", "empty_model"]

_HEAD_NAMES = ("classifier", "score")  # modules of a sequence classifier that PEFT saves by default


@dataclass(frozen=True)
class RunModel:
    """The model of a run.

    Args:
        adapted: The adapted model with its target layers and extras, on its device.
        processor: Tokenizer or image processor.
        lora_config: PEFT's description of the target layers, for the export.
        adopted: Update of the adapter that the run starts from, by target layer.
    """

    adapted: AdaptedModel
    processor: Processor
    lora_config: LoraConfig
    adopted: Mapping[str, LowRank]


def build_model(config: RunConfig, labels: tuple[str, ...], device: torch.device) -> RunModel:
    """Load the model of a run and find its trainable parts.

    Raises:
        FedspanError: If the model, its layers or the adapter do not exist or do not match.
    """
    loaded = _load(config, labels, device)
    require_packing(config, loaded.model, device)
    adapted, peft_config = _with_targets(config, loaded.model, loaded.new_modules)
    return RunModel(adapted, loaded.processor, peft_config, _adopt(config, adapted, labels))


def empty_model(
    config: RunConfig,
    labels: tuple[str, ...],
    architecture: Mapping[str, Any] | None,
    device: torch.device = META,
    depth: int | None = None,
) -> AdaptedModel:
    """Build the model of a run without its weights, with the run's target layers, extras and shapes.

    Args:
        config: Config of the run.
        labels: Labels of the data.
        architecture: Architecture, as for ``models.empty.load_empty``.
        device: Device, as for ``models.empty.load_empty``.
        depth: Depth, as for ``models.empty.load_empty``.

    Raises:
        FedspanError: If no config of the model is available, or layers do not exist.
    """
    wanted = config.model
    model = load_empty(
        wanted.name,
        PROBLEMS[config.task].head,
        labels,
        architecture=architecture,
        revision=wanted.revision,
        dtype=getattr(torch, wanted.dtype),
        attention=_attention(config, _planned_device(config.device)),
        image_size=wanted.image_size,
        device=device,
        depth=depth,
    )
    return _with_targets(config, model, ())[0]


def _planned_device(name: str) -> torch.device:
    """Return the kind of device that a run will use; this machine may lack it."""
    return torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


def _with_targets(config: RunConfig, model: Any, new: Sequence[str]) -> tuple[AdaptedModel, LoraConfig]:
    """Find the trainable parts of a model, and build PEFT's description of them."""
    saved = [] if config.model.scratch else _saved(config, model, new)
    try:
        peft_config = _lora_config(config, saved)
        targets = find_targets(model, peft_config)
    # PEFT's own checks, and patterns that are not valid regexes; the last two: a{9999999999}, ((((...
    except (ValueError, re.error, OverflowError, RecursionError) as error:
        asked = config.model.target_modules
        raise FedspanError("model.target_modules", asked, f"layers named as PEFT takes them ({error})") from None
    if config.model.gradient_checkpointing:
        try:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        except ValueError as error:
            raise FedspanError("model.gradient_checkpointing", True, f"false for this model ({error})") from None
    extras = find_rest(model, targets) if config.model.scratch else find_extras(model, saved)
    return AdaptedModel(model, targets, extras, find_buffers(model, extras)), peft_config


def _load(config: RunConfig, labels: tuple[str, ...], device: torch.device) -> Loaded:
    wanted, head = config.model, PROBLEMS[config.task].head
    load = load_scratch
    if not wanted.scratch:
        load = partial(load_pretrained, quantization=wanted.quantization, keep=wanted.modules_to_save)
    return load(
        wanted.name,
        head,
        labels,
        revision=wanted.revision,
        dtype=getattr(torch, wanted.dtype),
        attention=_attention(config, device),
        seed=config.seed,
        image_size=wanted.image_size,
        device=device,
    )


def _attention(config: RunConfig, device: torch.device) -> str | None:
    if config.model.attention != "auto":
        return config.model.attention
    # On a CPU the backward pass of fused attention takes longer than the three small products that it replaces.
    return "eager" if device.type == "cpu" else None


def _saved(config: RunConfig, model: nn.Module, new: Sequence[str]) -> list[str]:
    """List the modules that train in full: the head, those that the user names, and others with new weights."""
    new_head = PROBLEMS[config.task].head != "language-model"
    # PEFT's test: pre_classifier too
    heads = [name for name, _ in model.named_modules() if new_head and name.endswith(_HEAD_NAMES)]
    # New weights outside the head (a pooler): an adapter without them would not restore the model.
    uncovered = [path for path in new if path.split(".")[0] not in heads]
    return list(dict.fromkeys([*heads, *config.model.modules_to_save, *uncovered]))


def _lora_config(config: RunConfig, modules_to_save: list[str]) -> LoraConfig:
    """Build PEFT's config with the run's target modules."""
    model = config.model
    return LoraConfig(
        task_type=PROBLEMS[config.task].peft,
        base_model_name_or_path=published_name(model.name),
        revision=model.revision,
        target_modules=model.target_modules,
        exclude_modules=model.exclude_modules,
        layers_to_transform=model.layers_to_transform,
        layers_pattern=model.layers_pattern,
        modules_to_save=modules_to_save,
    )


def _adopt(config: RunConfig, adapted: AdaptedModel, labels: tuple[str, ...]) -> Mapping[str, LowRank]:
    """Load the starting adapter into the model and return its update; empty without one."""
    if config.model.adapter is None:
        return {}
    start = read_adapter(config.model.adapter, adapted.operators)
    foreign = sorted(set(start.extras) - set(adapted.spec.extras))
    if foreign:
        raise FedspanError("model.adapter", foreign[0], "saved modules that are the run's model.modules_to_save")
    for path, value in start.extras.items():
        if tuple(value.shape) != adapted.spec.extras[path]:
            expected = (
                f"one of shape {adapted.spec.extras[path]} for this model and the {len(labels)} labels of the data"
            )
            raise FedspanError("model.adapter", f"{path} of shape {tuple(value.shape)}", expected)
    adapted.adopt(start.factors, start.extras)
    return start.factors
