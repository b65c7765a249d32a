"""Options of methods and wrappers: the fields of their classes, as the user may set them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import cache
from typing import Any, get_type_hints

import pydantic
from pydantic import ConfigDict

from fedspan.config.validation_errors import convert_validation_errors
from fedspan.errors import FedspanError
from fedspan.methods.registry import get_method_class
from fedspan.wrappers.registry import WRAPPERS, get_wrapper_class

_HIDDEN = frozenset({"inner", "seed", "spec"})
"""Fields that the run sets, not the user."""


def validate_method_options(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Validate a method's options against the fields of its class and their types.

    Raises:
        FedspanError: If the method or an option is unknown, or a value has the wrong type or range.
    """
    if name in WRAPPERS:
        problem = f"{name!r} is a wrapper. Put it around a method: method: {{name: fedit, wrappers: [{name}]}}"
        raise FedspanError("method.name", name, problem=problem)
    return _validate_options(get_method_class(name), name, values, "method")


def validate_wrapper_options(position: int, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Validate the options of a wrapper, given by its position in ``method.wrappers``.

    Raises:
        FedspanError: If the wrapper or an option is unknown, or a value has the wrong type or range.
    """
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
