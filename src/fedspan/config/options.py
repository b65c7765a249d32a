"""A method's options: the fields of its class, as the user may set them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, get_type_hints

import pydantic
from pydantic import ConfigDict

from fedspan.config.mistakes import first_mistake
from fedspan.errors import FedspanError
from fedspan.methods.registry import method_class

__all__ = ["method_options"]


def method_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """A method's options, checked against its class's fields and their types.

    Raises:
        FedspanError: unknown method, unknown option, or a value of the wrong type or range.
    """
    cls = method_class(name)
    hints = get_type_hints(cls)
    fields = {
        field.name: (hints[field.name], field.default)
        for field in dataclasses.fields(cls)
        if field.name not in ("spec", "seed")
    }
    for option in given:
        if option not in fields:
            raise FedspanError(f"method.{option}", given[option], f"{name} has the options {', '.join(fields)}")
    model = pydantic.create_model("options", __config__=ConfigDict(extra="forbid"), **fields)  # pyright: ignore
    try:
        checked = model(**given).model_dump()
    except pydantic.ValidationError as error:
        raise first_mistake(error, "method") from None
    for option in dataclasses.fields(cls):
        _require_range(f"method.{option.name}", checked.get(option.name), option.metadata)
    return checked


def _require_range(field: str, value: object, bounds: Mapping[str, float]) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    if not bounds:
        if not 0 < value < math.inf:
            raise FedspanError(field, value, "a finite number above 0")
    elif not bounds["least"] <= value <= bounds["most"] or not math.isfinite(value):
        upper = f" and at most {bounds['most']:g}" if math.isfinite(bounds["most"]) else ""
        raise FedspanError(field, value, f"a finite number of at least {bounds['least']:g}{upper}")
