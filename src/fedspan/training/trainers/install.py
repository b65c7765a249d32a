"""A job's tensors as parameters of a user's model."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from fedspan.core.tensors import EXTRAS, group_by_layer, join_tensor_name
from fedspan.core.values import Job
from fedspan.models.adapted import AdaptedModel
from fedspan.models.targets import is_batch_norm

_PREFIX = "fedspan_"


@contextmanager
def install_job(root: nn.Module, adapted: AdaptedModel, job: Job) -> Generator[dict[str, Tensor]]:
    """Install a job within this context: its tensors are parameters of the target layers, named ``fedspan_<slot>``.

    So whatever walks over a model's parameters sees them: wrappers for several processes, mixed precision,
    checkpoints. On exit the model has its own parameters again, frozen.

    Args:
        root: The module that trains, around the model or the model itself.
        adapted: The model.
        job: The job.

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
        module for module in root.modules() if is_batch_norm(module) and not _has_trained_statistics(module, live)
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


def _has_trained_statistics(norm: nn.Module, live: Mapping[str, Tensor]) -> bool:
    """Check whether a norm's running statistics are among a job's tensors."""
    return any(norm.running_mean is value for value in live.values())


def _freeze_statistics(norm: nn.Module, args: object) -> None:
    """Let a norm use its running statistics: a trainer sets the whole model to training mode before every pass."""
    norm.training = False
