"""The digest of a model's frozen weights."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from fedspan.models.adapted import AdaptedModel

__all__ = ["hash_frozen"]


def hash_frozen(root: nn.Module, adapted: AdaptedModel) -> Any:
    """Return the SHA-256 object of all parameters and stored buffers of a module, but for a model's extras.

    Args:
        root: The model, or a module around it.
        adapted: The model.
    """
    digest = hashlib.sha256()
    job_tensors = {id(value) for value in adapted.get_values().values()}
    for name, value in sorted(root.state_dict(keep_vars=True).items()):
        if id(value) in job_tensors or name in adapted.extras or not isinstance(value, Tensor):
            continue
        digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest
