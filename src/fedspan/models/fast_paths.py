"""Fast paths of torch's transformer layers, which would pass over adapters."""

from __future__ import annotations

from typing import Any

from torch import nn


class BlockedFastPaths:
    """Makes the transformer layers within a model call their linear layers also in eval mode.

    In eval mode ``nn.TransformerEncoderLayer`` computes with the weights of ``linear1`` and ``linear2`` without calling
    them, so adapters of these layers would have no effect. A hook prevents that, as torch documents. Layers with
    hooks do not accept the nested tensors that ``nn.TransformerEncoder`` makes for the fast path.
    """

    def __init__(self, model: nn.Module) -> None:
        self._hooks = [
            module.register_forward_pre_hook(_do_nothing)
            for module in model.modules()
            if isinstance(module, nn.TransformerEncoderLayer)
        ]
        self._nesting = {
            module: module.use_nested_tensor for module in model.modules() if isinstance(module, nn.TransformerEncoder)
        }
        for encoder in self._nesting:
            encoder.use_nested_tensor = False

    def restore(self) -> None:
        """Allow the fast paths again."""
        for hook in self._hooks:
            hook.remove()
        for encoder, flag in self._nesting.items():
            encoder.use_nested_tensor = flag


def _do_nothing(module: nn.Module, inputs: Any) -> None:
    """Be a hook, whose presence makes a layer call the layers within it."""
