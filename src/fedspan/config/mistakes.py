"""Pydantic's complaints as the one kind of error that users see."""

from __future__ import annotations

from collections.abc import Sequence

import pydantic
from pydantic import BaseModel

from fedspan.errors import FedspanError, nearest

__all__ = ["first_mistake"]


def first_mistake(
    error: pydantic.ValidationError, prefix: str = "", root: type[BaseModel] | None = None
) -> FedspanError:
    """The first of pydantic's complaints as one line.

    Args:
        error: pydantic's.
        prefix: section that the fields stand in.
        root: model that was validated, to name the nearest fields to one that there is none of.
    """
    detail = error.errors(include_url=False)[0]
    inner = detail.get("ctx", {}).get("error")
    if isinstance(inner, FedspanError):
        return inner
    place = [prefix, *(str(part) for part in detail["loc"])]
    field = ".".join(part for part in place if part)
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        siblings = _fields_at(root, detail["loc"][:-1])
        message = f"no such field; the nearest are {nearest(str(detail['loc'][-1]), siblings)}"
    elif detail["type"] == "missing":
        return FedspanError(field, None, "is required")
    return FedspanError(field or "config", detail["input"], message[0].lower() + message[1:])


def _fields_at(model: type[BaseModel] | None, location: Sequence[int | str]) -> list[str]:
    if model is None:
        return []
    for part in location:
        annotation = model.model_fields[str(part)].annotation if str(part) in model.model_fields else None
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            model = annotation
    return list(model.model_fields)
