"""Export of a trained model as a plain Transformers model, for weights that no adapter of the pretrained ones holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from fedspan.core.base import BaseUpdate, materialize, to_dense
from fedspan.core.parametrization import compute_dense_change
from fedspan.core.tensors import group_by_layer
from fedspan.core.values import Job
from fedspan.errors import FedspanError
from fedspan.models.adapted import AdaptedModel
from fedspan.models.export import NOTES
from fedspan.models.loading import Processor, get_source
from fedspan.models.names import FROM_PYTHON, get_architecture
from fedspan.models.plain import is_plain_module, write_state_dict
from fedspan.models.quantized import is_quantized
from fedspan.models.sentence_encoders import HEAD, PooledClassifier, write_modules


def is_merging_required(job: Job, base: BaseUpdate) -> bool:
    """Check whether a model is more than pretrained weights plus a change: they were scaled or are replaced by factors.

    Args:
        job: The model as a job (``start(sync(state, client), client, memory)``).
    """
    slots = group_by_layer(job.tensors)
    effective = (
        parametrization.compute_effective(slots[layer]) for layer, parametrization in job.parametrization.items()
    )
    return base.rho != 1.0 or any(
        not effective_layer.base and effective_layer.weight is None for effective_layer in effective
    )


def merge_weights(adapted: AdaptedModel, job: Job, base: BaseUpdate) -> dict[str, Tensor]:
    """Return all weights of the model by path: target layers as they compute, extras and buffers as in the job.

    They are on the CPU, as a job's tensors are.

    Raises:
        FedspanError: If the model is quantized, since its weights can't be written as plain numbers.
    """
    adapted.install(job.parametrization, job.tensors, frozenset())
    weights = {path: value.detach().cpu() for path, value in adapted.model.state_dict().items()}
    slots = group_by_layer(job.tensors)
    for name, layer in adapted.layers.items():
        if is_quantized(layer.module):
            expected = "null: this method does not train an adapter of the base, and exports a whole model"
            raise FedspanError("model.quantization", type(layer.module).__name__, expected)
        W_OI = materialize(layer.get_original().cpu(), base, name)
        if name in job.parametrization:
            W_OI = W_OI + compute_dense_change(job.parametrization[name].compute_effective(slots[name]), W_OI)
        if layer.adopted is not None:
            W_OI = W_OI + to_dense(layer.adopted).cpu()
        weights[f"{name}.weight"] = layer.operator.to_stored(W_OI).to(layer.stored_weight.dtype).contiguous()
    return weights


def export_merged(
    folder: Path,
    adapted: AdaptedModel,
    job: Job,
    base: BaseUpdate,
    processor: Processor | None,
    notes: Mapping[str, object],
    revision: str | None = None,
) -> None:
    """Write a model that ``from_pretrained`` loads, its processor, and a ``fedspan.json`` beside them.

    Args:
        folder: Folder to write to; it is created, and files of an earlier export in it are replaced.
        processor: Tokenizer or image processor; None: the model has none.
        notes: JSON values for ``fedspan.json``, ``base_model`` among them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = merge_weights(adapted, job, base)
    length = int(str(notes["max_length"])) if isinstance(adapted.model, PooledClassifier) else 0
    save_model(folder, adapted.model, processor, str(notes["base_model"]), revision, weights, max_length=length)
    (folder / NOTES).write_text(json.dumps(notes, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save_model(
    folder: Path,
    model: Any,
    processor: Processor | None,
    name: str,
    revision: str | None,
    weights: Mapping[str, Tensor] | None = None,
    *,
    max_length: int,
) -> None:
    """Write a model and its processor with ``save_pretrained``; of a plain module, its state dict.

    Training and serving run without the model's dropout; the saved config contains it again, for further training.

    Args:
        processor: The model's tokenizer or image processor; None: it has none.
        name: Name that the model was loaded by; of one that was passed from Python and has no name, ``python:`` and
            that of its class.
        max_length: Maximum number of tokens of a text, which a pooled classifier's modules name.
    """
    if is_plain_module(model):
        write_state_dict(folder, model.state_dict() if weights is None else weights)
        if processor is not None:
            processor.save_pretrained(str(folder))
        return
    if isinstance(model, PooledClassifier):
        values = model.state_dict() if weights is None else weights
        folder.mkdir(parents=True, exist_ok=True)
        weight, bias = values[f"{HEAD}.weight"], values[f"{HEAD}.bias"]
        write_modules(folder, model.pooling, weight.shape[1], max_length, (weight, bias))
        prefix = f"{model.base_model_prefix}."
        weights = {path.removeprefix(prefix): value for path, value in values.items() if path.startswith(prefix)}
        model = model.encoder
    dropout = {key: value for key, value in model.config.to_dict().items() if "drop" in key}
    if not name.startswith(FROM_PYTHON) and get_architecture(name) is None:
        config = AutoConfig.from_pretrained(get_source(name), revision=revision, trust_remote_code=False)
        for key, value in config.to_dict().items():
            if "drop" in key and isinstance(value, float):
                setattr(model.config, key, value)
    transformers_logging.disable_progress_bar()
    try:
        with torch.no_grad():
            model.save_pretrained(str(folder), **({} if weights is None else {"state_dict": dict(weights)}))
    finally:
        transformers_logging.enable_progress_bar()
        for key, value in dropout.items():
            setattr(model.config, key, value)
    if processor is not None:
        processor.save_pretrained(str(folder))
