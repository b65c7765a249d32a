"""Frozen weights that FSDP2 shards over the processes of a trainer (``torch.distributed.fsdp.fully_shard``).

A sharded weight is a ``DTensor``, of which each process holds a part. FSDP gathers the weights of a block while it
computes, and then the block has them as plain tensors. The parameters that train are not sharded.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


def is_sharded(value: Tensor) -> bool:
    """Check whether this process holds only a part of a tensor."""
    tensors: Any = sys.modules.get("torch.distributed.tensor")  # its import takes a second, and no other model needs it
    return tensors is not None and isinstance(value, tensors.DTensor)


def gather(value: Tensor) -> Tensor:
    """Return the whole of a tensor, detached; if it is sharded, every process calls this at the same time."""
    whole: Any = value.detach()
    return whole.full_tensor() if is_sharded(value) else whole


def get_shard(value: Tensor) -> Tensor:
    """Return this process's part of a tensor, which may be empty, detached; a tensor that is not sharded itself."""
    part: Any = value.detach()
    return part.to_local() if is_sharded(value) else part


def cut_shard(value: Tensor, like: Tensor) -> Tensor:
    """Return the part of a tensor that this process would hold if it were sharded.

    Args:
        value: The whole tensor, on the device of ``like``.
        like: A sharded tensor of the same shape.
    """
    from torch.distributed.tensor import distribute_tensor

    layout: Any = like
    # Without a source rank, each process cuts its own copy and nothing is sent.
    return distribute_tensor(value.contiguous(), layout.device_mesh, layout.placements, src_data_rank=None).to_local()


def shard(
    model: nn.Module, replicated: Iterable[nn.Parameter], is_block: Callable[[nn.Module], bool], device: torch.device
) -> None:
    """Shard the weights of a model in place over all processes; it cannot be undone.

    Args:
        model: The model, frozen. Every process has the same one.
        replicated: Parameters that stay whole in each process, such as those that train. They are moved to ``device``.
        is_block: Whether the weights of a module are gathered together while it computes. The remaining weights are
            gathered for a whole pass.
    """
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    replicated = set(replicated)
    for value in replicated:
        value.data = value.data.to(device)
    mesh, uses = init_device_mesh(device.type, (distributed.get_world_size(),)), _count_uses(model)
    for module in reversed(list(model.modules())[1:]):  # children before the modules that contain them
        # A weight tied to one outside of the block belongs to the weights of the whole model.
        if is_block(module) and all(uses[id] == count for id, count in _count_uses(module).items()):
            fully_shard(module, mesh=mesh, ignored_params=replicated)
    fully_shard(model, mesh=mesh, ignored_params=replicated)


def _count_uses(module: nn.Module) -> Counter[int]:
    return Counter(id(value) for _, value in module.named_parameters(remove_duplicate=False))


def reshard(model: nn.Module) -> None:
    """Free weights that are still gathered: after a pass without a backward pass, FSDP leaves some of them whole."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
