"""Models that are no Transformers models: any ``nn.Module``, passed from Python and exported as a state dict."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fedspan.errors import FedspanError
from fedspan.models.calls import DROPOUTS
from fedspan.models.sentence_encoders import PooledClassifier

STATE_DICT = "state_dict.safetensors"
"""File of all weights of a model, beside its adapter or alone; ``model.load_state_dict(load_file(...))`` reads it."""


def is_plain_module(model: Any) -> bool:
    """Check whether a model is an ``nn.Module`` of neither Transformers, PEFT nor fedspan."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel | PooledClassifier) or type(model).__module__.startswith("peft."):
        return False
    return isinstance(model, nn.Module)


def has_name(model: Any) -> bool:
    """Check whether a model that was passed from Python can be loaded by its ``name_or_path``.

    A plain module cannot, nor can a Transformers model that was built from a config without a name: a repository that
    is named like its class is somebody else's.
    """
    return not is_plain_module(model) and bool(getattr(model, "name_or_path", ""))


def read_dtype(model: Any) -> str:
    """Return the name of a model's number format: its own ``dtype``, or that of its first floating-point parameter."""
    dtype = getattr(model, "dtype", None)
    if dtype is None and isinstance(model, nn.Module):
        dtype = next((value.dtype for value in model.parameters() if value.is_floating_point()), None)
    return str(dtype or torch.float32).removeprefix("torch.")


def adopt_module(model: nn.Module, device: torch.device | None = None) -> nn.Module:
    """Return a copy of a module, in eval mode. Dropout of its layers is 0, since the frozen base runs without it.

    Args:
        device: Target device; None: its own.
    """
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, DROPOUTS):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            module.dropout = 0.0
    return (model if device is None else model.to(device)).eval()


def write_state_dict(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write all weights of a model by name.

    Args:
        folder: Folder to write to; it is created.
        weights: The weights; tensors that share memory are written one by one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().cpu().clone().contiguous() for name, value in weights.items()}
    (folder / STATE_DICT).write_bytes(safetensors.torch.save(tensors, metadata={"format": "pt"}))


def read_state_dict(folder: Path, model: nn.Module) -> None:
    """Load all weights of a model from a folder.

    Raises:
        FedspanError: If the file is missing or damaged, or is of another model.
    """
    path = folder / STATE_DICT
    try:
        model.load_state_dict(safetensors.torch.load_file(str(path)))
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        problem = f"the weights cannot be loaded into the model ({reason})"
        raise FedspanError("folder", str(path), problem=problem) from None
