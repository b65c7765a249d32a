"""Bases that are larger than the device's memory: the rest is stored on the CPU or on disk (accelerate).

A module's offloaded weights are on the meta device; accelerate's hooks bring them to the device for each of its calls.
"""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_GIB = 1 << 30
_HEADS = ("classifier", "pre_classifier", "score")


@dataclass(frozen=True)
class Offload:
    """Limits on the memory of a base."""

    device: float | None = None
    """GiB on the device; None: all that is free."""
    cpu: float | None = None
    """GiB of the CPU's memory; None: all that is free."""

    def place(self, empty: Any, dtype: torch.dtype, device: torch.device, keep: Sequence[str]) -> dict[str, Any]:
        """Decide where each module is stored, by path: on the device, ``cpu`` or ``disk``.

        Args:
            keep: Names of modules that train whole; they and heads are on the device.
        """
        from accelerate import infer_auto_device_map
        from accelerate.utils import get_max_memory

        free = get_max_memory()
        training_device: Any = {"cpu": "cpu", "cuda": device.index or 0}.get(device.type, device.type)
        limits: dict[Any, Any] = {
            training_device: free[training_device] if self.device is None else int(self.device * _GIB)
        }
        if training_device != "cpu" or self.cpu is not None:
            limits["cpu"] = free["cpu"] if self.cpu is None else int(self.cpu * _GIB)
        unsplit_modules: list[str] = list(empty._no_split_modules or ())
        # Not "clean": one entry for a whole model could not leave out its head.
        places: dict[str, Any] = infer_auto_device_map(
            empty, limits, no_split_module_classes=unsplit_modules, dtype=dtype, clean_result=False
        )
        trained = re.compile(rf"(?:.*\.)?(?:{'|'.join(map(re.escape, (*_HEADS, *keep)))})(?:\..*)?")
        return {path: training_device if trained.fullmatch(path) else location for path, location in places.items()}

    def get_options(
        self, kind: Any, config: Any, dtype: torch.dtype, device: torch.device | None, keep: Sequence[str]
    ) -> dict[str, Any]:
        """Return the keyword arguments of ``from_pretrained`` that load an offloaded model.

        Args:
            device: Device that computes; None: the CPU.
        """
        from transformers.initialization import no_init_weights

        with no_init_weights(), torch.device("meta"):
            empty = kind.from_config(config, dtype=dtype, trust_remote_code=False)
        places = self.place(empty, dtype, device or torch.device("cpu"), keep)
        folder = tempfile.mkdtemp(prefix="fedspan-offload-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)  # if loading fails
        return {"device_map": places, "offload_folder": folder}


def remove_with(model: nn.Module, folder: str) -> None:
    """Remove a folder of offloaded weights when its model is gone."""
    weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)


def get_device(model: nn.Module) -> torch.device:
    """Return the device that a model computes on, even if all of its weights are offloaded."""
    first = next(model.parameters()).device
    if first.type != "meta":
        return first
    hooks: list[Any] = [vars(module)["_hf_hook"] for module in model.modules() if is_offloaded(module)]
    return torch.device(hooks[0].execution_device) if hooks else first


def is_offloaded(module: nn.Module) -> bool:
    """Check whether a module's weights are stored off the device between its calls."""
    if "_hf_hook" not in vars(module):
        return False
    from accelerate.utils import has_offloaded_params

    return has_offloaded_params(module)


def read_weight(module: nn.Module) -> Tensor:
    """Return a module's stored weight, brought to the device if it is offloaded; detached."""
    from accelerate.utils import align_module_device

    with align_module_device(module):
        weight = module.weight
        assert isinstance(weight, Tensor)
        return weight.detach()


def read_bias(module: nn.Module) -> Tensor | None:
    """Return a module's bias, brought to the device if it is offloaded; None if it has none."""
    from accelerate.utils import align_module_device

    with align_module_device(module):
        return getattr(module, "bias", None)
