"""The digest of a model's frozen weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedspan.models.sharded import gather


def hash_frozen(root: nn.Module, extras: Mapping[str, Tensor]) -> Any:
    """Return the SHA-256 object of all parameters and stored buffers of a module, but for a model's extras.

    If a module is sharded, every process calls this at the same time, and one tensor after another is gathered.

    Args:
        root: The model, or a module around it.
        extras: The model's extras and their buffers by path, which are left out by path and, where tied, by identity.
    """
    digest = hashlib.sha256()
    trained = {id(value) for value in extras.values()}
    for name, value in sorted(root.state_dict(keep_vars=True).items()):
        if id(value) in trained or name in extras or not isinstance(value, Tensor):
            continue
        digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        digest.update(gather(value).cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest
