"""What a secure sum is made of: changes of tensors as one vector, whose layout both sides know.

A change is taken from what all clients of a round begin with. ``changes.origin_of`` is that of a client that remembers
nothing, which the server can make; a client that is sent only what it misses can't. So the origin here is what
``Contribution`` promises: the value that training started from of a tensor under the name of one of the job's, and 0
of anything else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspan.core.tensors import Tensors

__all__ = ["flatten", "initial_values", "layout_of", "unflatten"]


def initial_values(contributed: Tensors, started: Tensors) -> dict[str, Tensor]:
    """The origin of what is contributed, in its shapes and number formats (integers, whose means are none: float64).

    Args:
        contributed: tensors that sum.
        started: the tensors of the job that a client's training began with.
    """
    made: dict[str, Tensor] = {}
    for name, value in contributed.items():
        dtype = value.dtype if value.is_floating_point() else torch.float64
        start = started.get(name)
        if start is not None and start.shape == value.shape:
            made[name] = start.to("cpu", dtype)
        else:
            made[name] = torch.zeros(value.shape, dtype=dtype)
    return made


def layout_of(origin: Tensors) -> str:
    """Digest of the names, shapes and number formats of what is summed."""
    found = hashlib.sha256()
    for name, value in sorted(origin.items()):
        found.update(f"{name}\0{value.dtype}\0{list(value.shape)}\n".encode())
    return found.hexdigest()


def flatten(change: Mapping[str, Tensor]) -> NDArray[np.float64]:
    """A change as one vector, in the order of the names."""
    parts = [change[name].detach().to("cpu", torch.float64).flatten().numpy() for name in sorted(change)]
    return np.concatenate(parts) if parts else np.zeros(0)


def unflatten(vector: NDArray[np.float64], origin: Tensors) -> dict[str, Tensor]:
    """The change in a vector, float64."""
    made: dict[str, Tensor] = {}
    at = 0
    for name, value in sorted(origin.items()):
        made[name] = torch.from_numpy(vector[at : at + value.numel()]).view(value.shape)
        at += value.numel()
    return made
