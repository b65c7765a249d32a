"""Selection of target layers and extras by PEFT's own rules, so that a config means the same here and there."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from fedspan.core.values import LayerSpec, Spec
from fedspan.errors import FedspanError, suggest_nearest
from fedspan.models.operators import build_operator, explain_unfit

if TYPE_CHECKING:
    from peft import LoraConfig

_LORA_CONTAINERS = ("lora_A", "lora_B", "lora_dropout", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
"""Containers that PEFT adds to a target layer."""


def _list_suffixes(model: nn.Module, config: LoraConfig) -> list[str]:
    """Return the last name parts of likely targets: layers outside the saved modules, except embeddings.

    Where the last part alone is a number, or also names a layer that cannot be a target (a convolution in groups), it
    is the last two parts.
    """
    saved = {f".{name}." for name in config.modules_to_save or ()}
    fit, others = list[str](), list[str]()
    for name, module in model.named_modules():
        is_fit = (
            explain_unfit(module) is None
            and _explain_unused(model, name) is None
            and _explain_tied(model, name, module) is None
        )
        if not is_fit:
            others.append(name)
        elif not isinstance(module, nn.Embedding) and not any(part in f".{name}." for part in saved):
            fit.append(name)
    ambiguous = {_get_last_parts(name, 1) for name in others}
    suffixes: set[str] = set()
    for name in fit:
        last = _get_last_parts(name, 1)
        suffixes.add(_get_last_parts(name, 2) if last in ambiguous or last.isdecimal() else last)
    return sorted(suffixes - {_get_last_parts(name, 2) for name in others})


def _get_last_parts(name: str, count: int) -> str:
    return ".".join(name.split(".")[-count:])


_ATTENTION = (["query", "value"], ["q_proj", "v_proj"], ["q_lin", "v_lin"])


def suggest_targets(model: nn.Module, outputs: int) -> list[str] | None:
    """Return names of layers to target in a model of an architecture for which PEFT has no default; None if it has one.

    They are the queries and values of attention, or else all linear and convolutional layers but the head.

    Args:
        outputs: Number of outputs of its head, which no other layer has.
    """
    from peft import LoraConfig
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    defaults = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    if getattr(getattr(model, "config", None), "model_type", None) in defaults:
        return None
    heads = [name for name, module in model.named_modules() if getattr(module, "out_features", None) == outputs]
    names = [
        name
        for name in _list_suffixes(model, LoraConfig(modules_to_save=heads))
        if not name.rpartition(".")[2].isdecimal()
    ]
    return next((pair for pair in _ATTENTION if set(pair) <= set(names)), names) or None


def find_targets(model: nn.Module, config: LoraConfig) -> dict[str, nn.Module]:
    """Return the target layers by module path, in the model's order.

    ``config.target_modules`` follows PEFT: a list of names or suffixes, a regex (a string), ``all-linear``, or None for
    PEFT's default of the architecture; ``layers_to_transform``, ``layers_pattern`` and ``exclude_modules`` too.

    Raises:
        FedspanError: If nothing matches (with the nearest names), or if a match can't be a target: it is of another
            kind, or shares its weight with another module.
    """
    from peft.tuners.tuners_utils import (
        _maybe_include_all_linear_layers,  # pyright: ignore[reportPrivateUsage]
        check_target_module_exists,
    )
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    if config.target_modules is None:
        architecture = getattr(getattr(model, "config", None), "model_type", None)
        defaults = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        if architecture not in defaults:
            raise FedspanError(
                "model.target_modules",
                None,
                f"names of modules, for example {', '.join(_list_suffixes(model, config)[:6])}",
                problem=f"PEFT has no default for the architecture {architecture!r}",
            )
        default = defaults[architecture]
        config.target_modules = default
    requested = config.target_modules
    config = _maybe_include_all_linear_layers(config, model)  # pyright: ignore[reportAssignmentType]
    targets: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        match = check_target_module_exists(config, name)
        if not match:  # PEFT marks excluded modules with a falsy value of its own
            continue
        reason = explain_unfit(module) or _explain_unused(model, name) or _explain_tied(model, name, module)
        if reason is not None:
            expected = f"other modules, for example {', '.join(_list_suffixes(model, config)[:6])}"
            raise FedspanError("model.target_modules", name, expected, problem=f"{name!r} {reason}")
        targets[name] = module
    if not targets:
        names = requested if isinstance(requested, str) else ", ".join(sorted(requested or ()))
        raise FedspanError(
            "model.target_modules",
            names,
            problem=f"{names!r} matches no layer{_format_layers_hint(config)}. "
            f"{suggest_nearest(names.split(',')[0], _list_suffixes(model, config))}",
        )
    return targets


_MAMBAS = ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")


def _explain_unused(model: nn.Module, name: str) -> str | None:
    """Return why an adapter of a layer of a state-space model would not work; None if it would.

    PEFT refuses to load adapters of the output projection, and a step's projection is multiplied without a call.
    """
    last = name.rpartition(".")[2]
    if getattr(getattr(model, "config", None), "model_type", None) not in _MAMBAS:
        return None
    if last == "out_proj":
        return (
            "is the output projection of a Mamba layer, whose weight fast kernels use without a call: PEFT refuses it"
        )
    if last == "dt_proj":
        return "is the step projection of a Mamba layer, whose weight is used without a call: it would not train"
    return None


def _explain_tied(model: nn.Module, name: str, module: nn.Module) -> str | None:
    for other, another in model.named_modules(remove_duplicate=False):
        if other != name and getattr(another, "weight", None) is module.weight:
            return f"shares its weight with {other}, and an update of one would separate them. Target neither"
    return None


def _format_layers_hint(config: LoraConfig) -> str:
    layers = config.layers_to_transform
    return "" if layers is None else f" among layers_to_transform={layers}"


def find_extras(model: nn.Module, modules_to_save: Sequence[str]) -> dict[str, nn.Parameter]:
    """Return the parameters of the modules in ``modules_to_save`` (suffix match, as in PEFT), by parameter path.

    Raises:
        FedspanError: If no module's path ends with one of the names.
    """
    parameters: dict[str, nn.Parameter] = {}
    matched: set[str] = set()
    for name, module in model.named_modules():
        for suffix in modules_to_save:
            if name == suffix or name.endswith("." + suffix):
                matched.add(suffix)
                for path, parameter in module.named_parameters(prefix=name):
                    parameters[path] = parameter
    for suffix in modules_to_save:
        if suffix not in matched:
            candidates = {name.rpartition(".")[2] for name, _ in model.named_modules() if name}
            raise FedspanError(
                "model.modules_to_save",
                suffix,
                problem=f"{suffix!r} matches no module. {suggest_nearest(suffix, candidates)}",
            )
    return parameters


def require_peft_names(model: nn.Module, modules_to_save: Sequence[str]) -> None:
    """Check that PEFT can save modules: it matches ends of paths, also within words and in its own adapters.

    Raises:
        FedspanError: If a name also matches the end of a container's path, which PEFT refuses when it loads an adapter.
    """
    kinds = nn.ModuleDict | nn.ModuleList | nn.ParameterDict | nn.ParameterList
    containers = [*_LORA_CONTAINERS, *(name for name, module in model.named_modules() if isinstance(module, kinds))]
    for suffix in modules_to_save:
        if (container := next((name for name in containers if name.endswith(suffix)), None)) is not None:
            problem = f"PEFT could not load the adapter: {suffix!r} is also the end of {container!r}, a container"
            expected = f"a longer end of the module's path, or another name of the module than {suffix!r}"
            raise FedspanError("model.modules_to_save", suffix, expected, problem=problem)


def find_other_parameters(model: nn.Module, targets: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Return all parameters outside the target layers' weights, by path; they train too in a model from scratch."""
    target_weights = {id(module.weight) for module in targets.values()}
    return {path: parameter for path, parameter in model.named_parameters() if id(parameter) not in target_weights}


def find_buffers(model: nn.Module, extras: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the buffers transmitted and saved with the extras: running statistics of norms that own extras."""
    owners = {path.rpartition(".")[0] for path in extras}
    return {
        f"{name}.{buffer}": value
        for name, module in model.named_modules()
        if name in owners and is_batch_norm(module)
        for buffer, value in module.named_buffers(recurse=False)
    }


def is_batch_norm(module: nn.Module) -> bool:
    """Check whether a module's forward pass updates running statistics."""
    return isinstance(module, nn.modules.batchnorm._NormBase)  # pyright: ignore[reportPrivateUsage]


def find_variances(model: nn.Module, buffers: Collection[str]) -> frozenset[str]:
    """Return those of some buffers by whose roots their norms divide."""
    return frozenset(
        path
        for name, module in model.named_modules()
        if is_batch_norm(module)
        for buffer, value in module.named_buffers(recurse=False)
        if value is module.running_var and (path := f"{name}.{buffer}") in buffers
    )


def make_spec(
    targets: Mapping[str, nn.Module],
    extras: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor] | None = None,
    variances: Collection[str] = (),
) -> Spec:
    """Build the methods' view of the model: target layers as matrices, shapes of the extras, names of their buffers."""
    layers: list[LayerSpec] = []
    for name, module in targets.items():
        operator = build_operator(module)
        layers.append(LayerSpec(name, *operator.shape, operator.kernel))
    buffers = buffers or {}
    shapes = {path: tuple(value.shape) for path, value in {**extras, **buffers}.items()}
    return Spec(tuple(layers), shapes, frozenset(buffers), frozenset(variances))
