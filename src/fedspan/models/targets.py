"""Finding the target layers and the extras by PEFT's own rules, so that a config means here what it means there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from peft import LoraConfig
from peft.tuners.tuners_utils import (
    _maybe_include_all_linear_layers,  # pyright: ignore[reportPrivateUsage]
    check_target_module_exists,
)
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from torch import nn
from transformers.pytorch_utils import Conv1D

from fedspan.core.values import LayerSpec, Spec
from fedspan.errors import FedspanError, nearest

__all__ = ["LINEAR_TYPES", "find_extras", "find_targets", "is_transposed", "make_spec", "shape_of"]

LINEAR_TYPES = (nn.Linear, Conv1D)


def is_transposed(module: nn.Module) -> bool:
    """Whether the module stores its weight as (I, O) (GPT-2's ``Conv1D``) instead of (O, I)."""
    return isinstance(module, Conv1D)


def shape_of(module: nn.Module) -> tuple[int, int]:
    """(O, I) of a linear layer's weight, however it is stored (4-bit weights are packed)."""
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    assert isinstance(module, Conv1D)
    return module.weight.shape[1], module.weight.shape[0]


def _suffixes(model: nn.Module, config: LoraConfig) -> list[str]:
    """Last parts of the names that may be targets: linear layers outside the modules that are saved whole."""
    saved = {f".{name}." for name in config.modules_to_save or ()}
    linear = [name for name, module in model.named_modules() if isinstance(module, LINEAR_TYPES)]
    return sorted({name.rpartition(".")[2] for name in linear if not any(part in f".{name}." for part in saved)})


def find_targets(model: nn.Module, config: LoraConfig) -> dict[str, nn.Module]:
    """The target layers by module path, in the model's order.

    ``config.target_modules`` follows PEFT: a list of names or suffixes, a regex (a string), ``all-linear``, or None for
    PEFT's default of the architecture; ``layers_to_transform``, ``layers_pattern`` and ``exclude_modules`` too.

    Raises:
        FedspanError: if nothing matches (with the nearest names), or if a match is neither linear nor ``Conv1D``.
    """
    if config.target_modules is None:
        architecture = getattr(getattr(model, "config", None), "model_type", None)
        defaults = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        if architecture not in defaults:
            raise FedspanError(
                "model.target_modules",
                None,
                f"PEFT has no default for the architecture {architecture!r}; "
                f"name modules, for example {', '.join(_suffixes(model, config)[:6])}",
            )
        chosen = defaults[architecture]
        config.target_modules = chosen
    asked = config.target_modules
    config = _maybe_include_all_linear_layers(config, model)  # pyright: ignore[reportAssignmentType]
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        match = check_target_module_exists(config, name)
        if not match:  # PEFT marks excluded modules with a falsy value of its own
            continue
        if not isinstance(module, LINEAR_TYPES):
            raise FedspanError(
                "model.target_modules",
                name,
                f"is a {type(module).__name__}; target nn.Linear or Conv1D layers, for example "
                f"{', '.join(_suffixes(model, config)[:6])}",
            )
        found[name] = module
    if not found:
        wanted = asked if isinstance(asked, str) else ", ".join(sorted(asked or ()))
        raise FedspanError(
            "model.target_modules",
            wanted,
            f"matches no layer{_layers_hint(config)}; the nearest module names are "
            f"{nearest(wanted.split(',')[0], _suffixes(model, config))}",
        )
    return found


def _layers_hint(config: LoraConfig) -> str:
    layers = config.layers_to_transform
    return "" if layers is None else f" among layers_to_transform={layers}"


def find_extras(model: nn.Module, modules_to_save: Sequence[str]) -> dict[str, nn.Parameter]:
    """The parameters of the modules named in ``modules_to_save`` (suffix match, as PEFT does), by parameter path.

    Raises:
        FedspanError: for a name that no module of the model ends with.
    """
    parameters: dict[str, nn.Parameter] = {}
    matched: set[str] = set()
    for name, module in model.named_modules():
        for wanted in modules_to_save:
            if name == wanted or name.endswith("." + wanted):
                matched.add(wanted)
                for path, parameter in module.named_parameters(prefix=name):
                    parameters[path] = parameter
    for wanted in modules_to_save:
        if wanted not in matched:
            known = {name.rpartition(".")[2] for name, _ in model.named_modules() if name}
            raise FedspanError(
                "model.modules_to_save", wanted, f"matches no module; the nearest are {nearest(wanted, known)}"
            )
    return parameters


def make_spec(targets: Mapping[str, nn.Module], extras: Mapping[str, nn.Parameter]) -> Spec:
    """What methods know of the model: shapes of target layers, as (O, I), and of the extras."""
    layers: list[LayerSpec] = []
    for name, module in targets.items():
        layers.append(LayerSpec(name, *shape_of(module)))
    return Spec(tuple(layers), {path: tuple(parameter.shape) for path, parameter in extras.items()})
