"""Cost of a forward and a backward pass of a model without values: FLOPs and peak bytes.

The pass runs the operations of a real one on tensors of the meta device; the cost of each is derived from its shapes. A
product of matrices (m, k) and (k, n) counts as 2 m k n FLOPs; sums, norms and activations, which take time but hardly
any FLOPs, are left out, as in the published figures of accelerators.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


@dataclass(frozen=True)
class PassCost:
    """Cost of one pass of a batch.

    Args:
        forward: FLOPs of the forward pass.
        backward: FLOPs of the backward pass, those of recomputed activations included.
        peak: Largest number of bytes that the pass has allocated and not yet released, gradients included.
    """

    forward: int
    backward: int
    peak: int


def meter_pass(loss: Callable[[], Tensor]) -> PassCost:
    """Meter a forward and backward pass; only a forward pass if nothing in it has a gradient.

    Args:
        loss: Function that runs the forward pass on the meta device; its result is summed.
    """
    with Meter() as meter:
        value = loss()
        forward = meter.flops
        if value.requires_grad:
            value.sum().backward()
    return PassCost(forward, meter.flops - forward, meter.peak)


class Meter(TorchDispatchMode):
    """Counter of the FLOPs of all operations and of the bytes of their results until these are released.

    If a model branches on values that do not exist (is all of the mask 1?), the answer is yes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.peak = 0
        """Bytes."""
        self._now = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return True if args[0].dtype == torch.bool else 1
        result = func(*args, **kwargs)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        inputs = {_get_address(value) for value in _list_tensors((args, kwargs))}
        for value in _list_tensors(result):
            if (address := _get_address(value)) not in inputs and address not in self._sizes:
                self._count(address, value.untyped_storage())
        return result

    def _count(self, address: int, storage: torch.UntypedStorage) -> None:
        self._sizes[address] = storage.nbytes()
        self._now += storage.nbytes()
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._release, address)

    def _release(self, address: int) -> None:
        self._now -= self._sizes.pop(address)


def _list_tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _get_address(value: Tensor) -> int:
    """Return an identifier of a storage that holds nothing, and so has no pointer to data."""
    return value.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
