"""Training of float32 parameters inside a model whose frozen weights are narrower."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def keep_in_float32(model: nn.Module, trained: Iterable[nn.Parameter]) -> None:
    """Convert the modules that own trained parameters to float32, in place; the rest of the model is unchanged.

    A step of the size of a learning rate is mostly rounded away in bfloat16 (8 bits of mantissa), so weights that an
    optimizer updates are float32. The floating inputs of such a module are cast up, and its floating outputs are cast
    back to the format that the rest of the model computes in. Parameters keep their identity (tied ones too).
    """
    ids = {id(parameter) for parameter in trained}
    narrow = {
        module: {parameter.dtype for parameter in module.parameters() if _is_narrow(parameter)}
        for module in _list_owners(model, ids)
    }
    # All formats are read before any module is converted: modules with tied weights convert each other's parameters.
    for module, dtypes in narrow.items():
        if dtypes:
            module.float()
            module.register_forward_pre_hook(_cast_up, with_kwargs=True)
            module.register_forward_hook(_cast_back(min(dtypes, key=str)))


def _is_narrow(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() < 4


def _list_owners(module: nn.Module, trained: set[int]) -> list[nn.Module]:
    """Return the topmost modules that contain only trained parameters, or own one directly."""
    inside = [id(parameter) in trained for parameter in module.parameters()]
    if not any(inside):
        return []
    if all(inside) or any(id(parameter) in trained for parameter in module.parameters(recurse=False)):
        return [module]
    return [owner for child in module.children() for owner in _list_owners(child, trained)]


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: _map(item, change) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [_map(item, change) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def _cast_up(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    def up(value: Tensor) -> Tensor:
        return value.float() if _is_narrow(value) else value

    return _map(args, up), _map(kwargs, up)


def _cast_back(dtype: torch.dtype) -> Callable[[nn.Module, Any, Any], Any]:
    def cast(module: nn.Module, args: Any, output: Any) -> Any:
        return _map(output, lambda value: value.to(dtype) if value.dtype == torch.float32 else value)

    return cast


def has_narrow_weights(model: nn.Module) -> bool:
    """Check whether any floating-point weight of a model has 16 bits or fewer, in whatever format the others are."""
    return any(_is_narrow(parameter) for parameter in model.parameters())


def compute_tolerance(model: nn.Module) -> float:
    """Return the relative rounding tolerance of predictions in the narrowest number format of a model's weights."""
    return 5e-2 if has_narrow_weights(model) else 1e-3
