"""Check that a model uses the weights of its target layers only by calling the layers, as adapters need it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedspan.errors import FedspanError
from fedspan.models.adapted import AdaptedModel
from fedspan.models.calls import enter_evaluation, replace_forward
from fedspan.models.offload import is_offloaded


class _DirectUses(TorchDispatchMode):
    """Records the target layers whose weights a forward pass uses outside of a call of the layer."""

    def __init__(self, adapted: AdaptedModel) -> None:
        super().__init__()
        self.layers: dict[str, None] = {}  # in the order of the uses
        self.is_in_model = False
        self._layers = {name: layer for name, layer in adapted.layers.items() if not is_offloaded(layer.module)}
        self._weights = self._list_weights()
        self._is_sharded = adapted.is_sharded

    def _list_weights(self) -> dict[int, str]:
        return {id(layer.stored_weight): name for name, layer in self._layers.items()}

    def observe(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the model's forward, whose uses of weights are recorded."""

        @functools.wraps(forward)
        def run(*args: Any, **options: Any) -> Any:
            with self._set_in_model(True):
                return forward(*args, **options)

        return run

    def call_layer(self) -> AbstractContextManager[None]:
        """Use a layer's weight by a call within this context."""
        return self._set_in_model(False)

    @contextmanager
    def _set_in_model(self, is_in_model: bool) -> Generator[None]:
        before, self.is_in_model = self.is_in_model, is_in_model
        try:
            yield
        finally:
            self.is_in_model = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_in_model:
            if self._is_sharded:  # a block has its gathered weights as other parameters
                self._weights = self._list_weights()
            names = (self._weights.get(id(value)) for value in tree_leaves((args, kwargs)))
            self.layers.update((name, None) for name in names if name is not None)
        return func(*args, **(kwargs or {}))


@contextmanager
def forbid_direct_uses(adapted: AdaptedModel) -> Generator[None]:
    """Run forward passes in evaluation mode, without gradients, in which layers' weights are only used by calls.

    A weight that a model uses as ``F.linear(x, layer.weight)`` has no adapter there, and merging would add it. Layers
    that a pass does not use at all, such as experts without tokens, are no such case. Compiled code runs as Python
    within this context. The model's ``forward`` is observed, because sentence-transformers calls it without the model's
    hooks.

    Raises:
        FedspanError: On exit, if a target layer's weight was used otherwise.
    """
    uses, layers, model = _DirectUses(adapted), adapted.layers.values(), adapted.model
    try:
        for layer in layers:
            layer.observe = uses.call_layer
        with (
            replace_forward(model, uses.observe(model.forward)),
            torch.compiler.set_stance("force_eager"),
            enter_evaluation(model),
            uses,
        ):
            yield
    finally:
        for layer in layers:
            layer.observe = None
    if uses.layers:
        name = next(iter(uses.layers))
        problem = (
            f"the model uses the weight of {name!r} without calling the layer (as F.linear(x, layer.weight) does), so "
            "that an adapter would have no effect there"
        )
        raise FedspanError("model.target_modules", name, "other modules", problem=problem)
