"""Models without weights, on the meta device: what a run would train, known before anything is downloaded.

Only the model's config is read: from the hub, a local folder, or given as an architecture. The classes, heads and
settings are those of ``models.loading``, so modules and shapes are those of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from fedspan.errors import FedspanError
from fedspan.models.loading import CLASSES, Head, prepare_config, source_of
from fedspan.models.names import architecture_of
from fedspan.models.resnet import SmallResNetConfig

__all__ = ["load_empty", "saved_bytes"]


def load_empty(
    name: str,
    head: Head,
    labels: Sequence[str] = (),
    *,
    architecture: Mapping[str, Any] | None = None,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
    image_size: int | None = None,
) -> Any:
    """A model of the meta device: modules and shapes, no values, in eval mode.

    Args:
        name: as for `load_pretrained`.
        head: a classifier over ``labels``, one number, or a language model head.
        labels: label names by index.
        architecture: a Transformers config as plain values with its ``model_type``, in place of the named model's.
        revision: of a hub model.
        dtype: of all weights.
        attention: ``eager`` or ``sdpa``; None: Transformers' choice.
        image_size: rows and columns of images; None: as the config says.

    Raises:
        FedspanError: no config that can be read, or one that has no such head.
    """
    shape = architecture_of(name)
    if shape and head != "image-classification":
        expected = "a model of texts; this one looks at images (task: image-classification)"
        raise FedspanError("model.name", name, expected)
    try:
        if shape:
            config: Any = SmallResNetConfig(shape["widths"], shape["depths"])
        elif architecture is None:
            config = AutoConfig.from_pretrained(source_of(name), revision=revision)
        else:
            config = AutoConfig.for_model(**architecture)
        prepare_config(config, head, labels)
        if image_size is not None and head == "image-classification":
            config.image_size = image_size
        options = {} if attention is None else {"attn_implementation": attention}
        with torch.device("meta"):
            model = CLASSES[head].from_config(config, dtype=dtype, **options)
    except (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        expected = f"a hub id that can be reached, a local folder with a model, or builtin:NAME ({reason})"
        raise FedspanError("model.name", name, expected) from error
    return model.eval()


def saved_bytes(model: nn.Module, trained: Sequence[nn.Parameter], inputs: Mapping[str, Tensor]) -> int:
    """Bytes that autograd keeps between a forward and a backward pass, found without computing either.

    Args:
        model: on the meta device.
        trained: parameters that have a gradient; nothing before the first of them is kept.
        inputs: of the forward pass, on the meta device.
    """
    held = {_address(value.untyped_storage()) for value in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        address = _address(storage)
        if address not in held:
            kept[address] = storage  # held on to, so that no other storage gets its address
        return value

    before = [parameter.requires_grad for parameter in model.parameters()]
    model.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            model(**inputs)
    finally:
        for parameter, wanted in zip(model.parameters(), before, strict=True):
            parameter.requires_grad_(wanted)
    return sum(storage.nbytes() for storage in kept.values())


def _address(storage: torch.UntypedStorage) -> int:
    """Tells storages apart that hold nothing, and so have no pointer to data."""
    return storage._cdata  # pyright: ignore[reportPrivateUsage]
