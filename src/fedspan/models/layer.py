"""A target layer that computes as a parametrization defines, in place of its module's own forward.

Shapes: O output features, I input features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from fedspan.core.base import BaseUpdate, Delta, materialize, to_dense
from fedspan.core.lowrank import LowRank, concatenate
from fedspan.core.parametrization import Effective, Parametrization
from fedspan.errors import FedspanError
from fedspan.models.offload import is_offloaded, read_bias, read_weight
from fedspan.models.operators import build_operator
from fedspan.models.quantized import dequantize, is_quantized
from fedspan.models.sharded import cut_shard, get_shard, is_sharded

Dropout = Callable[[Tensor, str], Tensor]


class AdaptedLayer:
    """One target layer's replaced forward."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.operator = build_operator(module)
        self.parametrization: Parametrization | None = None
        self.slots: Mapping[str, Tensor] = {}
        self.adopted: LowRank | None = None
        self.moved: Delta | None = None
        self.shrink = 1.0  # decay of the frozen base within a job
        self.dropout: Dropout | None = None
        self.stacked: Callable[[Tensor], Tensor] | None = None  # while several clients train in one pass
        self.capture: Callable[[str, LowRank], None] | None = None
        self.observe: Callable[[], AbstractContextManager[None]] | None = None  # is entered for each call
        self._captured: list[LowRank] = []
        self._expected = 0  # uses in forward passes since the last gradient was handed over
        self.base_forward = module.forward
        self._original: Tensor | None = None
        module.forward = self.forward  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def stored_weight(self) -> nn.Parameter:
        """The module's parameter, as stored."""
        weight = self.module.weight
        assert isinstance(weight, nn.Parameter)
        return weight

    @property
    def shared(self) -> tuple[LowRank | None, Delta | None, Tensor | None]:
        """Values that replicas of the layer share beside the stored weight."""
        return self.adopted, self.moved, self._original

    @shared.setter
    def shared(self, values: tuple[LowRank | None, Delta | None, Tensor | None]) -> None:
        self.adopted, self.moved, self._original = values

    def get_original(self) -> Tensor:
        """Return W0, (O, I), in its stored dtype; for a quantized layer, the dequantized numbers.

        Raises:
            FedspanError: If the weight is sharded: a process alone cannot read the whole of it.
        """
        if is_quantized(self.module):
            return dequantize(self.module)
        if is_sharded(self.stored_weight):
            problem = f"the whole weight of {self.name} is needed, of which each process has a part (FSDP)"
            raise FedspanError("trainer", self.name, "a trainer without FSDP", problem=problem)
        stored = read_weight(self.module) if self._original is None else self._original
        return self.operator.to_matrix(stored)

    def set_base(self, base: BaseUpdate) -> None:
        """Let the layer compute with ``rho * W0 + total``.

        A float32 module gets a working copy (W0 is stored separately). Narrower formats would round small changes away,
        so there, and in quantized and offloaded layers, W0 stays in place and the total is applied beside it. Of a
        sharded weight, each process changes its own part.

        Raises:
            FedspanError: If rho != 1 on a base that is offloaded or not float32.
        """
        delta = base.total.get(self.name)
        if is_offloaded(self.module):
            if base.rho != 1.0:
                raise FedspanError("model.device_map", "auto", "null, because this method scales the base")
            self.moved = None if delta is None else delta.to(read_weight(self.module).device)
            return
        if torch.promote_types(self.stored_weight.dtype, torch.float32) != self.stored_weight.dtype:
            if base.rho != 1.0:
                raise FedspanError(
                    "model.dtype", str(self.stored_weight.dtype), "float32, because this method scales the base"
                )
            self.moved = None if delta is None else delta.to(self.stored_weight.device)
            return
        if base.rho == 1.0 and delta is None and self._original is None:
            return
        if self._original is None:
            self._original = get_shard(self.stored_weight).clone()
        if is_sharded(self.stored_weight):
            working = self._original * base.rho
            if delta is not None:
                change = self.operator.to_stored(to_dense(delta).to(working.device, working.dtype))
                working += cut_shard(change, self.stored_weight)
        else:
            working = self.operator.to_stored(materialize(self.get_original(), base, self.name))
        get_shard(self.stored_weight).copy_(working)

    def restore(self) -> None:
        """Restore the module's own forward; this object cannot be used afterwards."""
        if getattr(self.base_forward, "__func__", None) is type(self.module).forward:
            del self.module.forward
        else:
            self.module.forward = self.base_forward  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output under the installed parametrization, in the base's compute dtype."""
        if self.observe is None:
            return self._compute(x)
        with self.observe():
            return self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        if self.stacked is not None:
            return self.stacked(x)
        if self.parametrization is None:
            return self.base_forward(x)
        effective = self.parametrization.compute_effective(self.slots)
        dtype = x.dtype if x.is_floating_point() else self.stored_weight.dtype
        pair: Tensor | None = None
        if effective.pair is not None:
            dropout = self.dropout if effective.dropout and x.is_floating_point() else None
            dropped = x if dropout is None else dropout(x, self.name)
            pair = self.operator.apply_change(effective.pair, dropped, dtype)
        y = self._apply_base(x, effective, pair)
        for fixed in (self.adopted, self.moved if effective.base else None):
            if fixed is not None:
                y = y + self.operator.apply_change(fixed, x, dtype) * self.shrink
        if pair is not None:
            y = y + pair
        if self.capture is not None and y.requires_grad:
            self._expected += 1
            inputs = x.detach()
            y.register_hook(lambda gradient: self._collect(gradient, inputs))
        return y

    def _apply_base(self, x: Tensor, effective: Effective, pair: Tensor | None) -> Tensor:
        """Return the product of the base or of its replacement weight, or only the bias if the pair is everything."""
        if effective.base and self.shrink == 1.0:
            return self.base_forward(x)
        bias = read_bias(self.module)
        if effective.base:
            y = self.base_forward(x)
            if bias is None:
                return y * self.shrink
            bias = self.operator.reshape_bias(bias)
            return (y - bias) * self.shrink + bias
        if effective.weight is not None:
            dtype = x.dtype if x.is_floating_point() else self.stored_weight.dtype
            return self.operator.apply(x, effective.weight.to(dtype), bias)
        assert pair is not None
        return torch.zeros_like(pair) if bias is None else self.operator.reshape_bias(bias).expand_as(pair)

    def _collect(self, dy: Tensor, x: Tensor) -> None:
        self._captured.append(self.operator.compute_gradient(dy, x))
        if len(self._captured) == self._expected:
            self.deliver_gradient()

    def deliver_gradient(self) -> None:
        """Pass the captured loss gradient with respect to the layer's whole weight to ``capture``, as factors.

        Called as soon as every use of the layer in the forward pass has received its gradient, so that activations do
        not accumulate over layers.
        """
        if self._captured and self.capture is not None:
            self.capture(self.name, concatenate(self._captured))
        self._captured.clear()
        self._expected = 0
