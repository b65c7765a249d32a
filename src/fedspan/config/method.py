"""The method of a run and its wrappers, as written in the config."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import cache
from typing import Any, get_type_hints

import pydantic
from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedspan.config.validation_errors import convert_validation_errors
from fedspan.core.method import Method, RegisteredMethod
from fedspan.core.values import OptimizerSpec, Spec
from fedspan.errors import FedspanError
from fedspan.methods.registry import get_method_class
from fedspan.wrappers.extras import ExtrasPolicy, WithExtras
from fedspan.wrappers.registry import WRAPPERS, get_wrapper_class, wrap


class WrapperConfig(BaseModel):
    """A wrapper, and any of its options."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    name: str
    """Key of the wrapper; fedspan methods lists them."""

    @model_validator(mode="before")
    @classmethod
    def _parse_key(cls, value: object) -> object:
        if isinstance(value, str):
            return {"name": value}
        if not isinstance(value, dict | WrapperConfig):
            raise ValueError("a key of fedspan methods, or {name: KEY} with options beside it")
        return value

    @property
    def options(self) -> dict[str, Any]:
        """All fields except the name."""
        return dict(self.model_extra or {})


class MethodConfig(BaseModel):
    """The method, and any of its options (``fedspan methods`` lists both)."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    name: str = "fedit"
    """Key of the method; fedspan methods lists them."""
    wrappers: list[WrapperConfig] = Field(default_factory=list)
    """Wrappers around the method, from the inside out: keys of fedspan methods, or with options {name: fedprox, mu:
    0.1}."""

    @property
    def options(self) -> dict[str, Any]:
        """All fields except the name and the wrappers."""
        return dict(self.model_extra or {})

    @property
    def title(self) -> str:
        """The method with its wrappers, as the tables name it: ``fedit+fedprox``."""
        return "+".join([self.name, *(wrapper.name for wrapper in self.wrappers)])

    def build(self, spec: Spec, seed: int) -> RegisteredMethod:
        """Build the method without wrappers."""
        options = validate_method_options(self.name, self.options)
        return get_method_class(self.name)(spec=spec, seed=seed, **options)

    def wrap(
        self,
        method: RegisteredMethod,
        policy: ExtrasPolicy | None,
        extras_lr_scale: float,
        optimizer: OptimizerSpec,
        max_grad_norm: float,
    ) -> Method:
        """Wrap a method and the extras in the run's wrappers.

        Args:
            max_grad_norm: Clipping norm of local training (0: none).
        """
        options = [
            (wrapper.name, validate_wrapper_options(position, wrapper.name, wrapper.options))
            for position, wrapper in enumerate(self.wrappers)
        ]
        extras = WithExtras(inner=method, policy=policy or method.claims.extras, lr_scale=extras_lr_scale)
        return wrap(extras, options, method.seed, optimizer, max_grad_norm)


_HIDDEN = frozenset({"inner", "seed", "spec"})
"""Fields that the run sets, not the user."""


def validate_method_options(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Validate a method's options against the fields of its class and their types."""
    if name in WRAPPERS:
        problem = f"{name!r} is a wrapper. Put it around a method: method: {{name: fedit, wrappers: [{name}]}}"
        raise FedspanError("method.name", name, problem=problem)
    return _validate_options(get_method_class(name), name, values, "method")


def validate_wrapper_options(position: int, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Validate the options of a wrapper, given by its position in ``method.wrappers``."""
    field = f"method.wrappers.{position}"
    return _validate_options(get_wrapper_class(name, field), name, values, field)


def _validate_options(cls: type[Any], name: str, values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    model = _build_model(cls)
    for option in values:
        if option not in model.model_fields:
            problem = f"{name} has no such option. Its options are {', '.join(model.model_fields)}"
            raise FedspanError(f"{prefix}.{option}", values[option], problem=problem)
    with convert_validation_errors(prefix):
        validated = model(**values).model_dump()
    for option in _list_options(cls):
        _require_range(f"{prefix}.{option.name}", validated[option.name], option.metadata)
    return validated


def _list_options(cls: type[Any]) -> list[dataclasses.Field[Any]]:
    return [option for option in dataclasses.fields(cls) if option.name not in _HIDDEN]


@cache
def _build_model(cls: type[Any]) -> type[pydantic.BaseModel]:
    """Build the model that validates the options of a class; once, because it takes milliseconds."""
    hints = get_type_hints(cls)
    fields: dict[str, Any] = {option.name: (hints[option.name], option.default) for option in _list_options(cls)}
    return pydantic.create_model("options", __config__=ConfigDict(extra="forbid"), **fields)


def _require_range(field: str, value: object, bounds: Mapping[str, float]) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    if not bounds:
        if not 0 < value < math.inf:
            raise FedspanError(field, value, "a finite number above 0")
        return
    exclusive = bounds.get("below", False)
    if (
        not bounds["minimum"] <= value <= bounds["maximum"]
        or not math.isfinite(value)
        or (exclusive and value == bounds["maximum"])
    ):
        relation = "below" if exclusive else "at most"
        upper = f" and {relation} {bounds['maximum']:g}" if math.isfinite(bounds["maximum"]) else ""
        raise FedspanError(field, value, f"a finite number of at least {bounds['minimum']:g}{upper}")
