"""The output layer of a classifier or regression model, and the features that enter it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedspan.models.adapted import AdaptedModel
from fedspan.models.precision import compute_tolerance
from fedspan.models.sharded import gather


class NoOutputLayer(ValueError):
    """A model whose logits are not those of one linear layer; the text is the reason, without a full stop."""


@dataclass(frozen=True)
class OutputLayer:
    """The linear layer that computes a model's logits."""

    path: str
    outputs: int
    features: int
    bias: bool


def find_output_layer(adapted: AdaptedModel) -> OutputLayer:
    """Find the linear layer among a model's extras that has as many outputs as the model's config has labels.

    Raises:
        NoOutputLayer: If there is no such layer, or more than one.
    """
    outputs = getattr(getattr(adapted.model, "config", None), "num_labels", 0)
    candidates = [
        (path, module)
        for path, module in adapted.model.named_modules()
        if isinstance(module, nn.Linear) and f"{path}.weight" in adapted.extras and module.out_features == outputs
    ]
    if len(candidates) != 1:
        raise NoOutputLayer(f"{len(candidates)} linear layers of its head have {outputs} outputs")
    path, module = candidates[0]
    return OutputLayer(path, outputs, module.in_features, module.bias is not None)


def find_untrained_head(adapted: AdaptedModel) -> tuple[str, ...]:
    """Find the output layer of a model of unknown origin if it looks untrained; empty if it does not."""
    try:
        path = find_output_layer(adapted).path
    except NoOutputLayer:
        return ()
    return (path,) if _is_untrained(cast(nn.Linear, adapted.model.get_submodule(path))) else ()


def find_frozen_heads(adapted: AdaptedModel) -> tuple[str, ...]:
    """Find the linear layers of a Transformers model that look untrained and do not train.

    They are behind its body, or in a body with other layers that were trained, such as a pooler that its checkpoint
    lacks.
    """
    model = adapted.model
    body = getattr(model, "base_model_prefix", "")
    if not body or not hasattr(model, body):
        return ()
    layers = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    inside = [path for path in layers if path.startswith(f"{body}.")]  # in order, by which sharded ones are gathered
    is_body_trained = any(_has_bias(layers[path]) and not _is_untrained(layers[path]) for path in inside)
    return tuple(
        path
        for path, module in layers.items()
        if (is_body_trained or path not in inside)
        and path not in adapted.layers
        and f"{path}.weight" not in adapted.extras
        and _is_untrained(module)
    )


def _has_bias(layer: nn.Linear) -> bool:
    return layer.bias is not None  # pyright: ignore[reportUnnecessaryComparison]


def _is_untrained(layer: nn.Linear) -> bool:
    """Check for a bias of zeros, which Transformers gives to new layers and which hardly survives a training step."""
    return _has_bias(layer) and not bool(gather(layer.bias).any())


class FeatureTap:
    """Reads the features that enter an output layer during forward passes."""

    def __init__(self, model: nn.Module, layer: OutputLayer) -> None:
        self._model, self._module = model, model.get_submodule(layer.path)
        self._layer = layer
        self._last: tuple[Tensor, Tensor] | None = None

    @contextmanager
    def record(self) -> Generator[None]:
        """Record the layer's input in every forward pass within this context.

        The layer computes other outputs meanwhile, by which ``take`` knows a token: those of a head of zeros are equal.
        """

        def record(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            generator, shape = torch.Generator().manual_seed(0), (args[0].shape[-1], output.shape[-1])
            weight = torch.randn(shape, generator=generator).to(output.device) / shape[0] ** 0.5
            self._last = (args[0], (args[0].float() @ weight).to(output.dtype))
            return self._last[1]

        handle = self._module.register_forward_hook(record)
        try:
            yield
        finally:
            handle.remove()
            self._last = None

    @property
    def features(self) -> Tensor:
        """The layer's input in the last forward pass, float32."""
        if self._last is None:
            raise NoOutputLayer(f"{self._layer.path} is not called")
        return self._last[0].float()

    def take(self, logits: Tensor) -> Tensor:
        """Return the features of the last forward pass, (examples, features), float32.

        Args:
            logits: The pass's logits, (examples, outputs). Decoders compute outputs for every token and select one: the
                features are those of the token whose outputs they are. If the model has logits for every token,
                (examples, tokens, outputs), the features are those of the tokens, one after another.

        Raises:
            NoOutputLayer: If the logits are not outputs of the layer.
        """
        if self._last is None:
            raise NoOutputLayer(f"{self._layer.path} is not called")
        features, output = self._last
        if logits.ndim == 3:
            features, output, logits = (value.flatten(0, 1) for value in (features, output, logits))
        if output.ndim == 3 and output.shape[0] == len(logits):
            token = (output.float() - logits.float()[:, None]).abs().amax(2).argmin(1)
            rows = torch.arange(len(logits), device=output.device)
            features, output = features[rows, token], output[rows, token]
        shape = (len(logits), self._layer.features)
        bound = compute_tolerance(self._model) * float(logits.float().abs().max())
        if tuple(features.shape) != shape or float((output.float() - logits.float()).abs().max()) > bound:
            raise NoOutputLayer(f"its logits are not the outputs of {self._layer.path}")
        return features.float()
