"""Conversion of pydantic's errors to the one kind of error that users see."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from types import NoneType
from typing import Any, get_args

import pydantic
from pydantic import BaseModel

from fedspan.data.config import CONTRADICTION
from fedspan.errors import FedspanError, suggest_nearest
from fedspan.section import VARIANT

_DATA_FILES = ("data.train", "data.test")


@contextmanager
def convert_validation_errors(prefix: str = "", root: type[BaseModel] | None = None) -> Generator[None]:
    """Convert pydantic's errors within this context (``convert_validation_error``)."""
    try:
        yield
    except pydantic.ValidationError as error:
        raise convert_validation_error(error, prefix, root) from None
    except UnicodeEncodeError as error:  # pydantic cannot hold a validator's message that quotes such a text
        raise FedspanError(prefix or "config", error.object, "text without half of a surrogate pair") from None


def convert_validation_error(
    error: pydantic.ValidationError, prefix: str = "", root: type[BaseModel] | None = None
) -> FedspanError:
    """Convert the first of pydantic's errors to one line.

    Args:
        root: The validated model, used to suggest similar names for an unknown field.
    """
    detail = error.errors(include_url=False)[0]
    inner = detail.get("ctx", {}).get("error")
    if isinstance(inner, FedspanError):
        return inner
    location = [prefix, *(str(part) for part in detail["loc"])]
    field = ".".join(part for part in location if part and not part.startswith(VARIANT)) or "config"
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        siblings = _list_fields(root, detail["loc"][:-1])
        problem = f"there is no such field. {suggest_nearest(str(detail['loc'][-1]), siblings)}"
        return FedspanError(field, detail["input"], problem=problem)
    if detail["type"] == CONTRADICTION:
        context = detail.get("ctx", {})
        contradicted = ".".join(part for part in (field if field != "config" else "", context["field"]) if part)
        return FedspanError(contradicted, context["value"], problem=context["problem"])
    if detail["type"] == "missing":
        return FedspanError(field, None, problem="this field is required")
    if field in _DATA_FILES and _is_object(detail["input"]):
        kind = type(detail["input"]).__name__
        problem = f"an object ({kind}) is not the path of a file. Pass data of this process as data=, beside the config"
        return FedspanError(field, kind, problem=problem)
    expected = _format_expectation(message)
    if detail["type"] == "model_type":
        expected += _describe_example(_find_section(root, detail["loc"]))
    if detail["type"] == "list_type" and isinstance(detail["input"], str):
        singular = field.removesuffix("s")
        if singular != field and singular.rpartition(".")[2] in _list_fields(root, detail["loc"][:-1]):
            expected += f". A single name belongs in {singular}"
    return FedspanError(field, detail["input"], expected)


def _describe_example(section: type[BaseModel] | None) -> str:
    """Return the shortest section, as a phrase that can follow "a section"; empty if some field has to be set."""
    if section is None:
        return ""
    try:
        section.model_validate({})
    except (pydantic.ValidationError, FedspanError):
        return ""
    return ", for example {} for its defaults"


def _is_object(value: Any) -> bool:
    """Check whether a value cannot come from a YAML file that was meant to name files."""
    if isinstance(value, list):
        return any(not isinstance(item, str) for item in value)
    return value is not None and not isinstance(value, str | int | float | dict)


def _format_expectation(message: str) -> str:
    """Turn pydantic's message into a noun phrase: ``Input should be a valid integer`` into ``a valid integer``."""
    phrase, _, detail = (
        message.removeprefix("Input should be ").replace(" should have at ", " with at ").partition(", ")
    )
    if not detail.startswith(("unable to parse", "got a number with a fractional part")):  # it only says so again
        phrase = ", ".join(filter(None, (phrase, detail)))
    if "dictionary or instance of" in phrase:
        return "a section: names of fields with their values"
    phrase = phrase[0].lower() + phrase[1:]
    if phrase.startswith(("greater", "less")):
        return f"a value {phrase}"
    return f"a {phrase}" if phrase.startswith(("string with", "list with", "dictionary with", "tuple with")) else phrase


def _list_fields(model: type[BaseModel] | None, location: Sequence[int | str]) -> list[str]:
    section = _find_section(model, location)
    return [] if section is None else list(section.model_fields)


def _find_section(model: type[BaseModel] | None, location: Sequence[int | str]) -> type[BaseModel] | None:
    """Return the model of the section at a place; None if there is none."""
    annotation: Any = model
    for part in location:
        annotation = _unwrap_optional(annotation)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            annotation = annotation.model_fields[str(part)].annotation if str(part) in annotation.model_fields else None
        elif str(part).startswith(VARIANT):
            annotation = _find_tagged_type(annotation, str(part))
    annotation = _unwrap_optional(annotation)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _unwrap_optional(annotation: Any) -> Any:
    kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
    return kinds[0] if len(kinds) == 1 and NoneType in get_args(annotation) else annotation


def _find_tagged_type(annotation: Any, tag: str) -> Any:
    for variant in get_args(annotation):
        if pydantic.Tag(tag) in getattr(variant, "__metadata__", ()):
            return get_args(variant)[0]
        if (inner_type := _find_tagged_type(variant, tag)) is not None:
            return inner_type
    return None
