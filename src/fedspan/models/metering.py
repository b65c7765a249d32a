"""What a forward and a backward pass of a model without values takes: FLOPs, and bytes at the peak.

The operations of the pass are those of a real one, on tensors of the meta device: what each of them costs is read off
its shapes. A product of matrices (m, k) and (k, n) counts as 2 m k n FLOPs; sums, norms and activations, which take
time but hardly any FLOPs, are left out, as in all figures of accelerators.
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

__all__ = ["Meter", "PassCost", "metered"]


@dataclass(frozen=True)
class PassCost:
    """What a pass of a batch takes.

    Args:
        forward: FLOPs.
        backward: FLOPs, those of activations that are computed again among them.
        peak: bytes of all that the pass makes and has not yet let go, gradients included, where that is most.
    """

    forward: int
    backward: int
    peak: int


def metered(loss: Callable[[], Tensor]) -> PassCost:
    """A pass, forward and backward, or forward only where nothing in it has a gradient.

    Args:
        loss: makes the forward pass on the meta device; what it returns is summed.
    """
    with Meter() as meter:
        value = loss()
        forward = meter.flops
        if value.requires_grad:
            value.sum().backward()
    return PassCost(forward, meter.flops - forward, meter.peak)


class Meter(TorchDispatchMode):
    """Counts the FLOPs of all operations, and the bytes of what they make until nobody holds it any more.

    Questions that a model asks of values that are not there (is all of the mask 1?) are answered with yes.
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
        made = func(*args, **kwargs)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=made)
        given = {_address(value) for value in _tensors((args, kwargs))}
        for value in _tensors(made):
            if (address := _address(value)) not in given and address not in self._sizes:
                self._count(address, value.untyped_storage())
        return made

    def _count(self, address: int, storage: torch.UntypedStorage) -> None:
        self._sizes[address] = storage.nbytes()
        self._now += storage.nbytes()
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._gone, address)

    def _gone(self, address: int) -> None:
        self._now -= self._sizes.pop(address)


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _address(value: Tensor) -> int:
    """Tells storages apart that hold nothing, and so have no pointer to data."""
    return value.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
