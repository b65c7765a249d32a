"""Models without weights, which show what a run would train before anything is downloaded.

Only the model's config is read: from the hub, from a local folder, or given as an architecture. Classes, heads and
settings are those of ``models.loading``, so modules and shapes are those of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig
from transformers.initialization import no_init_weights

from fedspan.errors import FedspanError
from fedspan.models.heads import Head, get_head
from fedspan.models.loading import build_from_config, get_source, prepare_config
from fedspan.models.names import MODEL_NAMES, describe_image_model_problem, describe_load_error, get_architecture
from fedspan.models.pooling import Pooling
from fedspan.models.resnet import SmallResNetConfig

META = torch.device("meta")
_SPREAD = 0.03  # spread of the distribution that weights are drawn from


def load_empty(
    name: str,
    head: Head | str,
    labels: Sequence[str] = (),
    *,
    architecture: Mapping[str, Any] | None = None,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
    image_size: int | None = None,
    pooling: Pooling | None = None,
    device: torch.device = META,
    depth: int | None = None,
) -> Any:
    """Build a model on the meta device: modules and shapes, no values, in eval mode.

    On a real device it has values, drawn so that nothing overflows; they serve only to measure time.

    Args:
        head: Head of the task, or its name in ``heads.HEADS``.
        architecture: A Transformers config as plain values with its ``model_type``, in place of the named model's.
        attention: ``eager`` or ``sdpa``; None: Transformers' default.
        image_size: Rows and columns of images; None: the config's value.
        depth: Number of blocks, if the config has such a field; None: the config's value.

    Raises:
        FedspanError: If no config can be read, or its model has no such head.
    """
    shape, head = get_architecture(name), get_head(head)
    if shape and not head.has_image_inputs:
        raise FedspanError("model.name", name, problem=describe_image_model_problem(name))
    try:
        if shape:
            config: Any = SmallResNetConfig(shape["widths"], shape["depths"])
        elif architecture is None:
            config = AutoConfig.from_pretrained(get_source(name), revision=revision, trust_remote_code=False)
        else:
            config = AutoConfig.for_model(**architecture)
        prepare_config(config, head, labels)
        if image_size is not None and head.has_image_inputs:
            config.image_size = image_size
        if depth is not None and hasattr(config, "num_hidden_layers"):
            config.num_hidden_layers = min(depth, config.num_hidden_layers)
        if getattr(config, "pad_token_id", None) is None:  # a run takes its tokenizer's; a classifier requires one
            config.pad_token_id = 0
        options = {} if attention is None else {"attn_implementation": attention}
        with no_init_weights(), device:
            model = build_from_config(config, head, pooling, dtype=dtype, **options)
    except (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError) as error:
        problem = f"{name!r} cannot be loaded ({describe_load_error(error)})"
        raise FedspanError("model.name", name, MODEL_NAMES, problem=problem) from error
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if device.type != "meta":
        _draw(model)
    return model.eval()


@torch.no_grad()
def _draw(model: nn.Module) -> None:
    """Draw small numbers for matrices from a separate generator, and set vectors (a norm's scale) to ones."""
    for value in model.parameters():
        if value.ndim > 1:
            rng = torch.Generator(value.device).manual_seed(0)
            value.uniform_(-_SPREAD, _SPREAD, generator=rng)
        else:
            value.fill_(1.0)
