"""A pretrained model whose target layers compute as a parametrization defines.

The module tree is unchanged: only the ``forward`` of the target layers is replaced, so names, hooks and exports are
those of the original model. Torch's transformer layers are kept from passing over it (``BlockedFastPaths``). Shapes: O
output features, I input features, R rank.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedspan.core.base import BaseUpdate
from fedspan.core.lowrank import LowRank
from fedspan.core.parametrization import Parametrization
from fedspan.core.tensors import EXTRAS, group_by_layer, join_extra_name
from fedspan.core.values import Spec
from fedspan.models.layer import AdaptedLayer, Dropout
from fedspan.models.offload import get_device
from fedspan.models.operators import Operator
from fedspan.models.precision import keep_in_float32
from fedspan.models.quantized import prevent_repacking
from fedspan.models.sharded import gather, is_sharded
from fedspan.models.targets import find_variances, is_batch_norm, make_spec


class AdaptedModel:
    """The pretrained model, its target layers and its extras.

    Args:
        model: Any module; frozen here (no parameter requires grad until a job trains it).
        extras: Parameters that train beside the target layers, by parameter path; converted to float32.
        buffers: Running statistics that belong to the extras, by path.

    Raises:
        FedspanError: If bitsandbytes has repacked 4-bit weights of the model for inference.
    """

    def __init__(
        self,
        model: nn.Module,
        targets: Mapping[str, nn.Module],
        extras: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor] | None = None,
    ) -> None:
        prevent_repacking(model)
        keep_in_float32(model, extras.values())
        self.model = model
        self.buffers = tuple(buffers or ())
        self.spec: Spec = make_spec(targets, extras, buffers, find_variances(model, self.buffers))
        self.layers = {name: AdaptedLayer(name, module) for name, module in targets.items()}
        self.extras = dict(extras)
        self._fast_paths = BlockedFastPaths(model)
        self._norms = {name: module for name, module in model.named_modules() if is_batch_norm(module)}
        self._initial_extras = {path: value.detach().clone() for path, value in self.get_values().items()}
        self._base = BaseUpdate()
        self._hash: Any = None  # the SHA-256 object of sharded weights
        model.requires_grad_(False)

    @property
    def operators(self) -> dict[str, Operator]:
        """Operators of the target layers, by module path."""
        return {name: layer.operator for name, layer in self.layers.items()}

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return get_device(self.model)

    @property
    def base(self) -> BaseUpdate:
        """The base of the server state that the model computes with."""
        return self._base

    def get_weight(self, layer: str) -> Tensor:
        """Return a copy of a target layer's W0, (O, I), as float32 on the CPU."""
        return self.layers[layer].get_original().to("cpu", torch.float32, copy=True).contiguous()

    def get_extra(self, parameter: str) -> Tensor:
        """Return a copy of an extra's value as loaded, on the CPU."""
        return self.get_initial(parameter).to("cpu", copy=True)

    def get_initial(self, path: str) -> Tensor:
        """Return the value of an extra or of one of its buffers, as loaded or adopted, on the model's device."""
        return self._initial_extras[path]

    def adopt(self, factors: Mapping[str, LowRank], extras: Mapping[str, Tensor]) -> None:
        """Start from an adapter: fix its update beside the base and use its saved modules as values of the extras."""
        for name, pair in factors.items():
            self.layers[name].adopted = pair.to(self.device)
        for path, value in extras.items():
            self._initial_extras[path] = value.to(self.device, self._initial_extras[path].dtype, copy=True)

    @property
    def is_sharded(self) -> bool:
        """Whether the weights of the target layers are sharded over several processes (FSDP)."""
        return any(is_sharded(layer.stored_weight) for layer in self.layers.values())

    def begin_sharded(self) -> None:
        """Adapt to weights that have been sharded since this object was built; every process calls this together."""
        self._initial_extras = {path: value.to(self.device) for path, value in self._initial_extras.items()}
        self._hash = hash_frozen(self.model, self.get_values())

    def hash_frozen(self) -> Any:
        """Return a new SHA-256 object of the frozen weights (``digest.hash_frozen``).

        Sharded weights were gathered for it in ``begin_sharded``, because one process alone cannot gather them.
        """
        return hash_frozen(self.model, self.get_values()) if self._hash is None else self._hash.copy()

    def set_base(self, base: BaseUpdate) -> None:
        """Compute with the base of a server state."""
        if base is self._base:
            return
        for layer in self.layers.values():
            layer.set_base(base)
        self._base = base

    def create_replica(self) -> AdaptedModel:
        """Create another model object on the same weights, with its own extras and state, for use in another thread."""
        job_tensors = {id(value) for value in self.get_values().values()}
        shared: list[object] = [
            value for value in (*self.model.parameters(), *self.model.buffers()) if id(value) not in job_tensors
        ]
        shared += [self._base, *(value for layer in self.layers.values() for value in layer.shared)]
        return copy.deepcopy(self, {id(value): value for value in shared})

    def share_base(self, other: AdaptedModel) -> None:
        """Compute with the base that was set on a replica of this model, or on the model that this one replicates."""
        self._base = other._base
        for name, layer in self.layers.items():
            layer.shared = other.layers[name].shared

    def install(
        self, parametrization: Mapping[str, Parametrization], tensors: Mapping[str, Tensor], trainable: frozenset[str]
    ) -> dict[str, Tensor]:
        """Install a job's tensors in the model.

        Args:
            tensors: Slots of target layers and extras; not modified.

        Returns:
            The live tensors by name: leaves that an optimizer may update (for extras, the model's own parameters).
        """
        self.set_dropout(None)  # a job that failed midway leaves its dropout and gradients of the extras
        live: dict[str, Tensor] = {}
        device = self.device  # without weights on it, all modules are searched for one
        for adapted in self.layers.values():
            adapted.shrink = 1.0
        for layer, slots in group_by_layer(tensors).items():
            if layer == EXTRAS:
                continue
            for slot, value in slots.items():
                name = f"{layer}/{slot}"
                live[name] = value.detach().to(device, copy=True).requires_grad_(name in trainable)
        for path, value in self.get_values().items():
            name = join_extra_name(path)
            value.grad = None
            with torch.no_grad():
                value.copy_(tensors.get(name, self._initial_extras[path]))
            value.requires_grad_(name in trainable)
            if name in tensors:
                live[name] = value
        self.bind(parametrization, live)
        return live

    def bind(self, parametrization: Mapping[str, Parametrization], live: Mapping[str, Tensor]) -> None:
        """Point the target layers at live tensors; call this again after a tensor was replaced."""
        grouped = group_by_layer(live)
        for name, layer in self.layers.items():
            layer.parametrization = parametrization.get(name)
            layer.slots = grouped.get(name, {})

    @torch.no_grad()
    def restore(self) -> None:
        """Return the original module, frozen, with its own weights and forwards."""
        self.set_base(BaseUpdate())
        self.install({}, {}, frozenset())
        for layer in self.layers.values():
            layer.restore()
        self._fast_paths.restore()

    def get_values(self) -> dict[str, Tensor]:
        """Return the live extras and their buffers; buffers are looked up, since a module may have replaced its own."""
        return {**self.extras, **{path: self.model.get_buffer(path) for path in self.buffers}}

    def train_mode(self, moving: frozenset[str]) -> None:
        """Enter training mode, except for norms with buffers outside ``moving``, whose statistics must not change."""
        self.model.train()
        for name, norm in self._norms.items():
            norm.train(join_extra_name(f"{name}.running_mean") in moving)

    def set_dropout(self, dropout: Dropout | None) -> None:
        """Set the dropout on the input of the adapter pairs (``lora_dropout``); None removes it."""
        for layer in self.layers.values():
            layer.dropout = dropout

    @contextmanager
    def capture_gradients(self, take: Callable[[str, LowRank], None]) -> Generator[None]:
        """Pass whole-weight gradients of the forward and backward passes within this context to ``take``.

        These passes do not train: running statistics are restored afterwards.

        Args:
            take: Callback, called once per pass for each layer that has a gradient, with the layer's name and dY^T X as
                float32 factors whose rank is the number of tokens.
        """
        before = {path: self.model.get_buffer(path).clone() for path in self.buffers}
        try:
            for layer in self.layers.values():
                layer.capture = take
            yield
            for layer in self.layers.values():
                layer.deliver_gradient()  # recomputed activations count more uses than there are gradients
        finally:
            for layer in self.layers.values():
                layer.capture = None
                layer.deliver_gradient()
            for path, value in before.items():
                self.model.get_buffer(path).copy_(value)


def hash_frozen(root: nn.Module, extras: Mapping[str, Tensor]) -> Any:
    """Return the SHA-256 object of all parameters and stored buffers of a module, but for a model's extras.

    If a module is sharded, every process calls this at the same time, and one tensor after another is gathered.

    Args:
        root: The model, or a module around it.
        extras: The model's extras and their buffers by path, which are left out by path and, where tied, by identity.
    """
    digest = hashlib.sha256()
    trained = {id(value) for value in extras.values()}
    for name, value in sorted(root.state_dict(keep_vars=True).items()):
        if id(value) in trained or name in extras or not isinstance(value, Tensor):
            continue
        digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        digest.update(gather(value).cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest


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
