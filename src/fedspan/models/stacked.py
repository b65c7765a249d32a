"""Several clients in one pass: their stacked batches share one frozen base, each with the client's own tensors.

Shapes: C clients, B examples of each (rows are C * B, client by client), T tokens, O output features, I input features,
R rank, N rows of a client. A target layer multiplies all rows by the frozen weight once and each client's rows by its
own factors (batched products); modules that hold extras run under ``vmap`` over their stacked parameters. Norms that
measure their batch see one client's rows at a time.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedspan.core.lowrank import LowRank
from fedspan.core.parametrization import Effective, Parametrization
from fedspan.core.tensors import EXTRAS, group_by_layer
from fedspan.models.adapted import AdaptedModel
from fedspan.models.layer import AdaptedLayer
from fedspan.models.layout import TokenLayout
from fedspan.models.operators import Linear, Operator
from fedspan.models.targets import is_batch_norm
from fedspan.models.unpadded import get_current_layout


def stack_effective(parametrization: Parametrization, slots: Mapping[str, Tensor]) -> Effective:
    """Compute a parametrization's ``Effective`` for every client at once.

    Args:
        parametrization: Parametrization of one layer, the same for all clients.
        slots: Stacked slots by name, (C, ...) each.

    Returns:
        The ``Effective``; its pair is a ``StackedPair`` or a matrix (C, O, I), its weight (C, O, I).
    """
    traced: list[Effective] = []

    def compute_parts(client_slots: dict[str, Tensor]) -> tuple[Tensor, ...]:
        effective = parametrization.compute_effective(client_slots)
        traced.append(effective)
        pair = effective.pair
        parts = () if pair is None else ((pair.B, pair.A) if isinstance(pair, LowRank) else (pair,))
        return parts if effective.weight is None else (*parts, effective.weight)

    stacked = vmap(compute_parts)(dict(slots))
    effective = traced[0]
    weight = None if effective.weight is None else stacked[-1]
    pair: Any = None
    if isinstance(effective.pair, LowRank):
        pair = StackedPair(stacked[0], stacked[1], effective.pair.scale)
    elif effective.pair is not None:
        pair = stacked[0]
    return Effective(pair, weight, effective.base, effective.dropout)


class StackedPair:
    """``scale * B A`` for every client: B (C, O, R), A (C, R, I)."""

    def __init__(self, B: Tensor, A: Tensor, scale: float) -> None:
        self.B, self.A, self.scale = B, A, scale

    def to(self, dtype: torch.dtype) -> StackedPair:
        """Convert to another number format."""
        return StackedPair(self.B.to(dtype), self.A.to(dtype), self.scale)


def can_add(operator: Operator, pair: Any, x_CB: Tensor, y: Tensor) -> bool:
    """Check whether ``add_product`` can be used."""
    return isinstance(operator, Linear) and isinstance(pair, StackedPair) and pair.A.dtype == x_CB.dtype == y.dtype


def add_product(y_CNO: Tensor, pair: StackedPair, x_CB: Tensor) -> Tensor:
    """Compute ``y + scale * x A^T B^T`` client by client; A, B and y must share one number format."""
    h_CNR = torch.bmm(x_CB.flatten(1, -2), pair.A.mT)
    return torch.baddbmm(y_CNO, h_CNR, (pair.B * pair.scale).mT)


def apply_stacked_change(operator: Operator, pair: Any, x_CB: Tensor, like: torch.dtype) -> Tensor:
    """Apply each client's change of weight to its rows, (C, B, ..., O): ``Operator.apply_change`` client by client."""
    factors = isinstance(pair, StackedPair)
    if isinstance(operator, Linear):
        if not factors:
            return _apply_stacked_linear(x_CB.to(pair.dtype), pair).to(like)
        h = _apply_stacked_linear(x_CB.to(pair.A.dtype), pair.A)
        return _apply_stacked_linear(h, pair.B * pair.scale).to(like)
    if factors:
        return vmap(lambda B, A, x: operator.apply_change(LowRank(B, A, pair.scale), x, like))(pair.B, pair.A, x_CB)
    return vmap(lambda matrix, x: operator.apply_change(matrix, x, like))(pair, x_CB)


def apply(operator: Operator, weight_COI: Tensor, x_CB: Tensor) -> Tensor:
    """Apply each client's own whole weight to its rows, without a bias."""
    if isinstance(operator, Linear):
        return _apply_stacked_linear(x_CB, weight_COI)
    return vmap(lambda matrix, x: operator.apply(x, matrix))(weight_COI, x_CB)


def _apply_stacked_linear(x_CB: Tensor, matrix_COI: Tensor) -> Tensor:
    """Compute ``x @ W_c^T`` client by client, as one batched product: (C, B, ..., I) -> (C, B, ..., O)."""
    product = torch.bmm(x_CB.flatten(1, -2), matrix_COI.mT)
    return product.unflatten(1, x_CB.shape[1:-1])


class Unstackable(Exception):
    """A model or job that can't train several clients in one pass; the text is the reason, without a full stop."""


class StackedLayer:
    """The forward of a target layer while several clients train.

    Args:
        layer: Layer that provides base, adopted update and dropout.
        parametrization: Parametrization of this layer, the same for all clients; None: only the base.
        slots: Stacked slots by name, (C, ...) each.
        bias: Stacked biases, (C, O), if the layer's bias is among the extras.
        clients: Number of clients, C.
        rows: Number of rows, C * B.
    """

    def __init__(
        self,
        layer: AdaptedLayer,
        parametrization: Parametrization | None,
        slots: Mapping[str, Tensor],
        bias: Tensor | None,
        clients: int,
        rows: int,
    ) -> None:
        self.layer, self.bias, self.clients, self.rows = layer, bias, clients, rows
        self.effective = None if parametrization is None else stack_effective(parametrization, slots)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the layer's output, with rows as in ``x``."""
        layer, operator, effective = self.layer, self.layer.operator, self.effective
        dtype = x.dtype if x.is_floating_point() else layer.stored_weight.dtype
        if effective is None:
            return self._apply_base(x)
        grouped = self._group(x)
        pair, dropped = effective.pair, grouped
        if pair is not None and layer.dropout is not None and effective.dropout and x.is_floating_point():
            dropped = self._group(layer.dropout(x, layer.name))
        if pair is not None and dtype == torch.bfloat16:  # as in `Operator.apply_change`
            pair = pair.to(dtype)
        if effective.base:
            y = self._apply_base(x)
        elif effective.weight is not None:
            y = self._add_bias(self._ungroup(apply(operator, effective.weight.to(dtype), grouped), x))
        else:
            y, pair = self._add_bias(self._ungroup(apply_stacked_change(operator, pair, dropped, dtype), x)), None
        for fixed in (layer.adopted, layer.moved if effective.base else None):
            if fixed is not None:
                y = y + operator.apply_change(fixed, x, dtype)
        if pair is None:
            return y
        if can_add(operator, pair, dropped, y) and isinstance(pair, StackedPair) and self._get_packed_layout(x) is None:
            return add_product(y.view(self.clients, -1, y.shape[-1]), pair, dropped).view(y.shape)
        return y + self._ungroup(apply_stacked_change(operator, pair, dropped, dtype), x)

    def _group(self, x: Tensor) -> Tensor:
        """Reshape (rows, ...) -> (C, B, ...); an example may have several rows, or all tokens stand in a row.

        Some models flatten tokens into the rows, and Swin its windows.
        """
        if (layout := self._get_packed_layout(x)) is not None:
            return layout.group_by_client(x)
        if x.shape[0] == 1 and self.rows > 1:
            raise Unstackable(f"{self.layer.name} is given one input for all examples of a batch")
        if x.shape[0] % self.rows or (x.shape[0] != self.rows and not x.is_floating_point()):
            raise Unstackable(f"{self.layer.name} is given an input of {tuple(x.shape)} for {self.rows} examples")
        return x.unflatten(0, (self.clients, -1))

    def _ungroup(self, y_CB: Tensor, like: Tensor) -> Tensor:
        layout = self._get_packed_layout(like)
        return y_CB.flatten(0, 1) if layout is None else layout.ungroup(y_CB).view(*like.shape[:-1], -1)

    def _get_packed_layout(self, x: Tensor) -> TokenLayout | None:
        """Return the layout of an input without padding; None if it is padded."""
        layout = get_current_layout()
        return layout if layout is not None and layout.is_flat(x) else None

    def _apply_base(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return self.layer.base_forward(x)
        operator = self.layer.operator
        return self._add_bias(operator.apply(x, operator.to_matrix(self.layer.stored_weight)))

    def _add_bias(self, y: Tensor) -> Tensor:
        operator = self.layer.operator
        if self.bias is None:
            bias = getattr(self.layer.module, "bias", None)
            return y if bias is None else y + operator.reshape_bias(bias)
        grouped = self._group(y)
        biases = vmap(operator.reshape_bias)(self.bias)  # (C, O) or, for a convolution, (C, O, 1, 1)
        middle = grouped.ndim - 1 - (biases.ndim - 1)
        return self._ungroup(grouped + biases.reshape(self.clients, *[1] * middle, *biases.shape[1:]), y)


class StackedModule:
    """The forward of a module that holds extras while several clients train."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path, self.module = path, module
        self._original = module.forward
        self._values: Mapping[str, Tensor] | None = None
        self._clients = self._rows = 0
        module.forward = self.forward  # pyright: ignore[reportAttributeAccessIssue]

    @contextmanager
    def hold_tensors(self, values: Mapping[str, Tensor], clients: int, rows: int) -> Generator[None]:
        """Compute with (C, ...) parameters within this context; running statistics of norms are updated in place."""
        self._values, self._clients, self._rows = values, clients, rows
        try:
            yield
        finally:
            self._values = None

    def forward(self, *args: Any, **options: Any) -> Any:
        """Compute the module's output, with rows as in its input."""
        values = self._values
        if values is None:
            return self._original(*args, **options)
        if len(args) != 1 or options or not isinstance(args[0], Tensor):
            raise Unstackable(f"{self.path} takes more than one input")
        x_CB = self._group(args[0])
        self._values = None  # the module itself is called below
        try:
            if is_batch_norm(self.module):
                outputs = [
                    self._call({name: value[c] for name, value in values.items()}, x) for c, x in enumerate(x_CB)
                ]
                return torch.cat(outputs)
            return vmap(self._call)(dict(values), x_CB).flatten(0, 1)
        finally:
            self._values = values

    def _call(self, values: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(self.module, dict(values), (x,))

    def _group(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1 and self._rows > 1:  # positions, which all rows share
            x = x.expand(self._rows, *x.shape[1:])
        if x.shape[0] % self._rows:
            raise Unstackable(f"{self.path} is given an input of {tuple(x.shape)} for {self._rows} examples")
        return x.unflatten(0, (self._clients, -1))


class StackedModel:
    """Installer of several clients' tensors in an adapted model at once.

    Args:
        adapted: The adapted model; outside of ``hold_tensors`` its forward is unchanged.
    """

    def __init__(self, adapted: AdaptedModel) -> None:
        self.adapted = adapted
        self._modules: dict[str, StackedModule] = {}
        for path in (*adapted.extras, *adapted.buffers):
            owner = path.rpartition(".")[0]
            if owner not in adapted.layers and owner not in self._modules:
                self._modules[owner] = StackedModule(owner, adapted.model.get_submodule(owner))

    def explain_refusal(self) -> str | None:
        """Return why this model can't be stacked, as far as its modules show; None if they show no obstacle."""
        for path, module in self._modules.items():
            if any(module.module.children()):
                return f"{path or 'the model'} holds parameters that train beside modules of its own"
        return None

    @contextmanager
    def hold_tensors(
        self,
        parametrization: Mapping[str, Parametrization],
        tensors: Mapping[str, Tensor],
        clients: int,
        rows: int,
    ) -> Generator[None]:
        """Forward ``rows`` examples, those of C clients one below the other, within this context.

        Args:
            tensors: Slots of target layers and extras, (C, ...) each; running statistics are updated in place.
            clients: Number of clients, C.
            rows: Number of rows, C * B.

        Raises:
            Unstackable: If a forward pass within the context has rows in an unexpected place.
        """
        grouped = group_by_layer(tensors)
        extras = grouped.pop(EXTRAS, {})
        owned: dict[str, dict[str, Tensor]] = {}
        for path in (*self.adapted.extras, *self.adapted.buffers):
            owner, _, name = path.rpartition(".")
            value = extras.get(path)
            owned.setdefault(owner, {})[name] = self._get_initial(path, clients) if value is None else value
        layers = self.adapted.layers
        try:
            for name, layer in layers.items():
                bias = owned.get(name, {}).get("bias")
                layer.stacked = StackedLayer(
                    layer, parametrization.get(name), grouped.get(name, {}), bias, clients, rows
                )
            with ExitStack() as contexts:
                for path, module in self._modules.items():
                    contexts.enter_context(module.hold_tensors(owned[path], clients, rows))
                yield
        finally:
            for layer in layers.values():
                layer.stacked = None

    def _get_initial(self, path: str, clients: int) -> Tensor:
        value = self.adapted.get_initial(path)
        return value.expand(clients, *value.shape)
