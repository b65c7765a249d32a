"""The vectors of a secure sum: tensor changes flattened into one vector, whose layout both sides know.

A change is relative to values that all clients of a round share. The server can compute ``changes.origin_of``, the
contribution of a client without memory, but a client that receives only the tensors it lacks cannot. So the origin here
follows the contract of ``Contribution``: the initial value for a tensor that has the name of one of the job's tensors,
and 0 for any other.
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
    """Return the origin of a contribution in its shapes and dtypes (float64 for integers, because means are not).

    Args:
        contributed: Tensors that are summed.
        started: Initial tensors of a client's first job.
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
    """Return the digest of the names, shapes and dtypes of the summed tensors."""
    found = hashlib.sha256()
    for name, value in sorted(origin.items()):
        found.update(f"{name}\0{value.dtype}\0{list(value.shape)}\n".encode())
    return found.hexdigest()


def flatten(change: Mapping[str, Tensor]) -> NDArray[np.float64]:
    """Flatten a change into one vector, in the order of the names."""
    parts = [change[name].detach().to("cpu", torch.float64).flatten().numpy() for name in sorted(change)]
    return np.concatenate(parts) if parts else np.zeros(0)


def unflatten(vector: NDArray[np.float64], origin: Tensors) -> dict[str, Tensor]:
    """Restore the change from a vector, in float64."""
    made: dict[str, Tensor] = {}
    at = 0
    for name, value in sorted(origin.items()):
        made[name] = torch.from_numpy(vector[at : at + value.numel()]).view(value.shape)
        at += value.numel()
    return made
