"""A job's tensors as parameters of a user's model."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedspan.core.tensors import EXTRAS, group_by_layer, join_tensor_name
from fedspan.core.values import Job
from fedspan.models.adapted import AdaptedModel
from fedspan.models.sharded import get_shard
from fedspan.models.targets import is_batch_norm

_PREFIX = "fedspan_"


@contextmanager
def install_job(root: nn.Module, adapted: AdaptedModel, job: Job) -> Generator[dict[str, Tensor]]:
    """Install a job within this context: its tensors are parameters of the target layers, named ``fedspan_<slot>``.

    So whatever walks over a model's parameters sees them: wrappers for several processes, mixed precision,
    checkpoints. On exit the model has its own parameters again, frozen.

    Yields:
        The live tensors by name.
    """
    root.requires_grad_(False)
    live = adapted.install(job.parametrization, job.tensors, frozenset(job.trainable_names))
    registered: list[tuple[nn.Module, str]] = []
    for layer, slots in group_by_layer(live).items():
        if layer == EXTRAS:
            continue
        module = adapted.layers[layer].module
        for slot, value in slots.items():
            parameter = nn.Parameter(value.detach(), requires_grad=value.requires_grad)
            module.register_parameter(_PREFIX + slot, parameter)
            registered.append((module, _PREFIX + slot))
            live[join_tensor_name(layer, slot)] = parameter
    adapted.bind(job.parametrization, live)
    frozen_norms = [
        module
        for module in root.modules()
        if is_batch_norm(module) and not any(module.running_mean is value for value in live.values())
    ]
    hooks = [module.register_forward_pre_hook(_freeze_statistics) for module in frozen_norms]
    try:
        yield live
    finally:
        for hook in hooks:
            hook.remove()
        for module, name in registered:
            delattr(module, name)
        adapted.set_dropout(None)
        adapted.bind({}, {})
        root.requires_grad_(False)


def _freeze_statistics(norm: nn.Module, args: object) -> None:
    """Let a norm use its running statistics: a trainer sets the whole model to training mode before every pass."""
    norm.training = False


_CHUNK = 1 << 20
_MIX, _STEP = 0x5851F42D4C957F2D, 0x14057B7EF767814F  # odd, below 2**63


class FrozenBase:
    """The reference of a module's frozen weights, taken when it is built.

    A server state's base changes the weights of target layers in place, so for them the original weight is compared,
    and the working weight only within one base.

    Args:
        adapted: The model; its extras are no part of the reference, because they are set for every job.
    """

    def __init__(self, root: nn.Module, adapted: AdaptedModel) -> None:
        self._root, self._adapted, self._base = root, adapted, adapted.base
        layers = {id(layer.stored_weight): layer for layer in adapted.layers.values()}
        state = root.state_dict(keep_vars=True)
        self._targets = {name: layers[id(value)] for name, value in state.items() if id(value) in layers}
        checksums = checksum_frozen(root, adapted.get_values())
        self._working = {name: checksums[name] for name in self._targets if name in checksums}
        self._reference = {name: self._get_original_checksum(name, value) for name, value in checksums.items()}

    def list_changed(self, checksums: Mapping[str, int]) -> list[str]:
        """List the weights that differ from the reference.

        Args:
            checksums: Checksums of the module now (``checksum_frozen``).
        """
        if self._adapted.base is not self._base:
            self._base = self._adapted.base
            self._working = {name: checksums[name] for name in self._working if name in checksums}
        return [
            name
            for name, expected in self._reference.items()
            if name not in checksums
            or self._get_original_checksum(name, checksums[name]) != expected
            or checksums[name] != self._working.get(name, checksums[name])
        ]

    def _get_original_checksum(self, name: str, stored: int) -> int:
        """Return the checksum of a weight without the server state's base, given that of the stored weight."""
        original = self._targets[name].shared[2] if name in self._targets else None
        return stored if original is None else _checksum(original)


def checksum_frozen(root: nn.Module, live: Mapping[str, Tensor]) -> dict[str, int]:
    """Compute a checksum of every parameter and stored buffer of a module that does not belong to a job.

    Returns:
        Checksums of the raw values and their order, by name; computed on the module's device. Of a sharded weight,
        each process has that of its own part.
    """
    job_tensors = {id(value) for value in live.values()}
    state = root.state_dict(keep_vars=True)
    return {
        name: _checksum(value)
        for name, value in state.items()
        if isinstance(value, Tensor) and id(value) not in job_tensors and not value.is_meta
    }


@torch.no_grad()
def _checksum(value: Tensor) -> int:
    """Return the sum of a tensor's words, each multiplied by a number of its position, modulo 2**64."""
    raw = get_shard(value).contiguous().flatten().view(torch.uint8)
    if raw.numel() % 4 == 0 and raw.storage_offset() % 4 == 0:
        raw = raw.view(torch.int32)
    factors = torch.arange(1, min(len(raw), _CHUNK) + 1, device=raw.device) * _MIX  # wraps around
    factors = (factors ^ (factors >> 29)) * 2 + 1  # odd: a change of one word never vanishes
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    for words in raw.split(_CHUNK):
        total = total * _STEP + (words * factors[: len(words)]).sum()
    return int(total)
