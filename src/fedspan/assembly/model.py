"""The task, the model and the dependent notes of a run."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fedspan.assembly.task import require_packing
from fedspan.config import RunConfig
from fedspan.core.lowrank import LowRank
from fedspan.data.catalogue import get_dataset_entry
from fedspan.errors import FedspanError
from fedspan.models.adapted import AdaptedModel
from fedspan.models.export import StartingAdapter, read_adapter
from fedspan.models.head import find_untrained_head
from fedspan.models.names import FROM_PYTHON, get_architecture, get_published_name
from fedspan.models.offload import Offload, is_offloaded
from fedspan.models.plain import has_name
from fedspan.models.pooling import Pooling
from fedspan.models.sentence_encoders import find_pooling
from fedspan.models.sharded import is_sharded
from fedspan.models.targets import (
    find_buffers,
    find_extras,
    find_other_parameters,
    find_targets,
    require_peft_names,
)
from fedspan.run_folder import require_intact_model
from fedspan.tasks.task import Examples, RunTask

if TYPE_CHECKING:
    from peft import LoraConfig

    from fedspan.models.loading import Loaded, Processor


def require_saveable(processor: Processor | None) -> None:
    """Check that a processor can be exported with its model."""
    if processor is not None and not hasattr(processor, "save_pretrained"):
        expected = "a tokenizer or processor of Transformers, whose save_pretrained(folder) exports it with the model"
        raise FedspanError("tokenizer", type(processor).__name__, expected)


def require_size(config: RunConfig, model: nn.Module, task: RunTask, examples: Examples, device: torch.device) -> None:
    """Check that a model accepts images of the size that they were resized to.

    Raises:
        FedspanError: If it does not. A ViT, for example, has position embeddings for one size.
    """
    if not config.task_definition.has_image_inputs:
        return
    batch = task.collate(examples, [0], device)
    try:
        with torch.no_grad():
            task.predict(model, batch)
    except (ValueError, RuntimeError) as error:
        rows, columns = batch["pixel_values"].shape[-2:]
        expected = f"a size that the model accepts; it refuses {rows} x {columns} pixels: {error}"
        raise FedspanError("model.image_size", config.model.image_size, expected.splitlines()[0]) from error


_HEAD_NAMES = ("classifier", "score", "qa_outputs")  # modules that PEFT saves by default, by its types of tasks


@dataclass(frozen=True)
class RunModel:
    """The model of a run.

    Args:
        adapted: The adapted model with its target layers and extras, on its device.
        processor: Tokenizer or image processor; None: the model has none.
        lora_config: PEFT's description of the target layers, for the export; None: the layers were named instead of
            found, by a process that exports the model itself.
        adopted: Update of the adapter that the run starts from, by target layer.
        new_modules: Paths of the modules with new weights, neither from the checkpoint nor from the adapter.
        pooling: Pooling of texts; None: Transformers' own classifier, or a task that pools none.
    """

    adapted: AdaptedModel
    processor: Processor | None
    lora_config: LoraConfig | None
    adopted: Mapping[str, LowRank]
    new_modules: tuple[str, ...]
    pooling: Pooling | None = None


@dataclass(frozen=True)
class ModelObjects:
    """A model and its tokenizer (or image processor) that were passed from Python; None: loaded by name."""

    model: Any = None
    tokenizer: Any = None


def build_model(
    config: RunConfig,
    labels: tuple[str, ...],
    device: torch.device,
    objects: ModelObjects | None = None,
    targets: Sequence[str] | None = None,
) -> RunModel:
    """Load the model of a run and find its trainable parts.

    Args:
        objects: Model and tokenizer that were passed from Python; None: they are loaded by name.
        targets: Paths of the target layers, as another process found them; None: they are found by PEFT's rules.
    """
    loaded = _load(config, labels, device, objects or ModelObjects())
    processor = config.task_definition.get_processor(loaded.processor)
    require_saveable(processor)
    require_packing(config, loaded.model, device)
    adapted, peft_config = adapt_model(config, loaded.model, loaded.new_modules, targets)
    start = adopt_adapter(config, adapted, labels)
    restored = {path.rpartition(".")[0] for path in start.extras}
    new = tuple(path for path in loaded.new_modules if path not in restored)
    if objects is not None and objects.model is not None:
        new = find_untrained_head(adapted)
    return RunModel(adapted, processor, peft_config, start.factors, new, get_pooling(config))


def build_empty_model(
    config: RunConfig,
    labels: tuple[str, ...],
    architecture: Mapping[str, Any] | None,
    device: torch.device | None = None,
    depth: int | None = None,
) -> AdaptedModel:
    """Build the model of a run without its weights, with the run's target layers, extras and shapes.

    Args:
        architecture: Architecture, as for ``models.empty.load_empty``.
        device: Device, as for ``models.empty.load_empty``; None: the meta device.
        depth: Depth, as for ``models.empty.load_empty``.
    """
    from fedspan.models.empty import META, load_empty

    settings = config.model
    # The kind of device that a run will use; this machine may lack it.
    kind = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    model = load_empty(
        settings.name,
        config.task_definition.head,
        labels,
        architecture=architecture,
        revision=settings.revision,
        dtype=getattr(torch, settings.dtype),
        attention=_choose_attention(config, torch.device(kind)),
        image_size=settings.image_size,
        pooling=get_pooling(config),
        device=META if device is None else device,
        depth=depth,
    )
    return adapt_model(config, model, ())[0]


def adapt_model(
    config: RunConfig, model: Any, new: Sequence[str], named: Sequence[str] | None = None
) -> tuple[AdaptedModel, LoraConfig | None]:
    """Find the trainable parts of a model, and build PEFT's description of them.

    Args:
        model: The model, whose target layers compute as a job defines from now on.
        named: Paths of the target layers, if they are known; PEFT's description is None then.
    """
    saved = [] if config.model.is_from_scratch else _list_modules_to_save(config, model, new)
    peft_config = None
    if named is not None:  # without PEFT, whose import takes 50 MB of each worker
        targets = {path: model.get_submodule(path) for path in named}
    else:
        peft_config, targets = _find_targets(config, model, saved)
    if config.model.gradient_checkpointing:
        try:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        except (ValueError, AttributeError) as error:  # the latter: no Transformers model
            raise FedspanError(
                "model.gradient_checkpointing", True, "false", problem=f"this model does not support it ({error})"
            ) from None
    extras = find_other_parameters(model, targets) if config.model.is_from_scratch else find_extras(model, saved)
    if peft_config is not None:
        require_peft_names(model, saved)
    offloaded = [path for path in extras if is_offloaded(model.get_submodule(path.rpartition(".")[0]))]
    if offloaded:
        problem = f"{offloaded[0]} trains whole, but it is offloaded"
        expected = "modules outside of the blocks, or a larger model.max_memory"
        raise FedspanError("model.modules_to_save", config.model.modules_to_save, expected, problem=problem)
    sharded = [path for path, value in extras.items() if is_sharded(value)]
    if sharded:
        problem = (
            f"{sharded[0]} trains whole, but FSDP shards it since an earlier run of this script, in which it did not "
            "train. Start the script again"
        )
        raise FedspanError("model.modules_to_save", config.model.modules_to_save, problem=problem)
    return AdaptedModel(model, targets, extras, find_buffers(model, extras)), peft_config


def _find_targets(config: RunConfig, model: Any, saved: list[str]) -> tuple[LoraConfig, dict[str, nn.Module]]:
    """Find target layers by PEFT's rules, and build PEFT's description of them."""
    try:
        peft_config = _build_lora_config(config, saved, _name_base(config, model))
        return peft_config, find_targets(model, peft_config)
    # PEFT's own checks, and patterns that are not valid regexes; the last two: a{9999999999}, ((((...
    except (ValueError, re.error, OverflowError, RecursionError) as error:
        requested = config.model.target_modules
        raise FedspanError(
            "model.target_modules", requested, problem=f"PEFT does not accept these names of layers ({error})"
        ) from None


def _load(config: RunConfig, labels: tuple[str, ...], device: torch.device, objects: ModelObjects) -> Loaded:
    if objects.model is not None:
        if config.model.device_map is not None:
            problem = "it applies to a model that is loaded by its name, not to one that was passed from Python"
            raise FedspanError("model.device_map", "auto", problem=problem)
        from fedspan.models.loading import adopt_loaded

        return adopt_loaded(objects.model, objects.tokenizer, config.task_definition.head, labels, device)
    loaded = _load_named(config, labels, device)
    return loaded if objects.tokenizer is None else replace(loaded, processor=objects.tokenizer)


def _load_named(config: RunConfig, labels: tuple[str, ...], device: torch.device) -> Loaded:
    from fedspan.models.loading import load_pretrained, load_scratch

    settings, head = config.model, config.task_definition.head
    load = load_scratch
    if not settings.is_from_scratch:
        offload = None
        if settings.device_map is not None:
            offload = Offload(settings.max_memory.get("device"), settings.max_memory.get("cpu"))
        load = partial(
            load_pretrained, quantization=settings.quantization, keep=settings.modules_to_save, offload=offload
        )
    return load(
        settings.name,
        head,
        labels,
        revision=settings.revision,
        dtype=getattr(torch, settings.dtype),
        attention=_choose_attention(config, device),
        seed=config.seed,
        image_size=settings.image_size,
        pooling=get_pooling(config),
        device=device,
    )


def get_pooling(config: RunConfig) -> Pooling | None:
    """Return the pooling of a run's texts; None: the one of Transformers' own classifier.

    A task without a classifier pools by the mean where nothing else is known, as sentence-transformers does.
    """
    resolved, embeds, data = resolve_pooling(config)[0].model, config.task_definition.is_embedding, config.data
    if resolved.pooling in ("auto", "stock"):
        return Pooling("mean") if embeds else None
    pair = data.text_pair or (data.dataset and get_dataset_entry(data.dataset, "data.dataset").columns.text_pair)
    return Pooling(resolved.pooling, bool(resolved.pooling_normalize), pairs=not embeds and pair is not None)


def resolve_pooling(config: RunConfig) -> tuple[RunConfig, str | None]:
    """Return a config that names its classifier's pooling, and a note for the user if ``auto`` had to guess.

    A config without a choice (another task, an architecture, a classifier that was passed from Python) is returned as
    it is.
    """
    settings, embeds = config.model, config.task_definition.is_embedding
    name = settings.name.removeprefix(FROM_PYTHON)
    if (settings.name != name and not embeds) or get_architecture(name) is not None:
        return config, None
    if not config.task_definition.can_pool or settings.pooling == "stock" or settings.pooling_normalize is not None:
        return config, None
    from fedspan.models.loading import get_source

    search = find_pooling(get_source(name), settings.revision)
    normalize, note = search.pooling is not None and search.pooling.normalize, None
    if settings.pooling != "auto":
        changes = {"pooling_normalize": normalize}
    elif search.pooling is None and embeds:
        changes = {"pooling": "mean", "pooling_normalize": False}
        reason = search.doubt or "it is not a sentence encoder"
        note = f"model.pooling is mean: how {name} pools is not known ({reason}); cls, max and last are others"
    elif search.pooling is None:
        changes = {"pooling": "stock"}
        if search.doubt is not None:
            note = (
                f"model.pooling is stock: whether {settings.name} is a sentence encoder, and how it pools, is "
                f"not known ({search.doubt}); mean, cls, max and last name a pooling"
            )
    else:
        changes = {"pooling": search.pooling.mode, "pooling_normalize": normalize}
    return config.model_copy(update={"model": settings.model_copy(update=changes)}), note


def _choose_attention(config: RunConfig, device: torch.device) -> str | None:
    if config.model.attention != "auto":
        return config.model.attention
    # On a CPU the backward pass of fused attention takes longer than the three small products that it replaces.
    return "eager" if device.type == "cpu" else None


def _list_modules_to_save(config: RunConfig, model: nn.Module, new: Sequence[str]) -> list[str]:
    """List the modules that train in full: the head, those that the user names, and others with new weights."""
    new_head = config.task_definition.model_head.is_new
    # PEFT's test: pre_classifier too
    heads = [name for name, _ in model.named_modules() if new_head and name.endswith(_HEAD_NAMES)]
    # New weights outside the head (a pooler): an adapter without them would not restore the model.
    uncovered = [path for path in new if path.split(".")[0] not in heads]
    return list(dict.fromkeys([*heads, *config.model.modules_to_save, *uncovered]))


def list_unnamed_modules(config: RunConfig, model: RunModel) -> list[str]:
    """List the modules that train in full because their weights are new, without being the head or in the config.

    A process whose model has all weights, like the one of an owner's own trainer, does not find them.
    """
    if config.model.is_from_scratch:
        return []
    module = model.adapted.model
    named = find_extras(module, _list_modules_to_save(config, module, ()))
    return [path for path in model.new_modules if not find_extras(module, [path]).keys() <= named.keys()]


def _name_base(config: RunConfig, model: nn.Module) -> str | None:
    """Return the name that an adapter's base is loaded by; None: the base was passed from Python and has none."""
    name = config.model.name
    return None if name.startswith(FROM_PYTHON) and not has_name(model) else get_published_name(name)


def _build_lora_config(config: RunConfig, modules_to_save: list[str], base: str | None) -> LoraConfig:
    from peft import LoraConfig, TaskType

    model = config.model
    return LoraConfig(
        task_type=None if (kind := config.task_definition.peft_task_type) is None else TaskType(kind),
        base_model_name_or_path=base,
        revision=model.revision,
        target_modules=model.target_modules,
        exclude_modules=model.exclude_modules,
        layers_to_transform=model.layers_to_transform,
        layers_pattern=model.layers_pattern,
        modules_to_save=modules_to_save,
    )


def adopt_adapter(config: RunConfig, adapted: AdaptedModel, labels: tuple[str, ...]) -> StartingAdapter:
    """Load the starting adapter into the model and return it; empty without one."""
    if config.model.adapter is None:
        return StartingAdapter({}, {})
    require_intact_model(Path(os.path.expanduser(config.model.adapter)))
    start = read_adapter(config.model.adapter, adapted.operators, adapted.model)
    foreign = sorted(set(start.extras) - set(adapted.spec.extras))
    if foreign:
        raise FedspanError("model.adapter", foreign[0], "saved modules that are in the run's model.modules_to_save")
    for path, value in start.extras.items():
        if tuple(value.shape) != adapted.spec.extras[path]:
            expected = (
                f"one of shape {adapted.spec.extras[path]} for this model and the {len(labels)} labels of the data"
            )
            raise FedspanError("model.adapter", f"{path} of shape {tuple(value.shape)}", expected)
    adapted.adopt(start.factors, start.extras)
    return start
