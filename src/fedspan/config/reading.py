"""Reading a configuration: YAML, overrides, plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic
import yaml

from fedspan.config.sections import RunConfig
from fedspan.config.validation_errors import first_mistake
from fedspan.errors import FedspanError

__all__ = ["load_config", "override", "parse_config", "parse_text", "read_values"]


def parse_config(values: Mapping[str, Any]) -> RunConfig:
    """Parse a config from plain values.

    Raises:
        FedspanError: If the values are invalid, for the first mistake.
    """
    try:
        return RunConfig.model_validate(values)
    except pydantic.ValidationError as error:
        raise first_mistake(error, root=RunConfig) from None


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load a config from a YAML file and ``a.b=c`` overrides.

    Raises:
        FedspanError: If the file is missing, unreadable or no YAML mapping, or for the first mistake in it.
    """
    return parse_config(override(read_values(path), overrides))


def read_values(path: str | Path) -> dict[str, Any]:
    """Read the plain values in a config's YAML file, without validation.

    Raises:
        FedspanError: If the file is missing, unreadable or no YAML mapping.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with a zero byte
        raise FedspanError(
            "config", str(path), problem=f"{str(path)!r} cannot be read as a YAML file ({error})"
        ) from None
    return parse_text(text, str(path))


def parse_text(text: str, where: str) -> dict[str, Any]:
    """Parse the plain values in the text of a config, without validation.

    Args:
        text: YAML text.
        where: The file of the text.

    Raises:
        FedspanError: If the text is not YAML, or not a mapping.
    """
    try:
        values = yaml.safe_load(text)
    # ValueError: a date with month 13. The parser itself raises the others, on texts such as "? [" and "!!int _".
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FedspanError("config", where, problem=f"{where!r} is not valid YAML ({error})") from None
    if not isinstance(values, dict):
        raise FedspanError(
            "config",
            where,
            "a YAML mapping with the sections model, data, method, ...",
            problem=f"{where!r} holds no mapping",
        )
    return values


def override(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply ``a.b=c`` overrides to a copy of ``values``, in order; ``c`` is YAML (``[1, 2]``, ``true``, ``null``).

    Raises:
        FedspanError: If an override lacks ``=``, or its path leads into a value that is not a section.
    """
    try:
        changed: dict[str, Any] = _copied(values)
    except RecursionError:  # caused by a YAML anchor
        raise FedspanError("config", None, problem="a section contains itself, through a YAML anchor") from None
    for text in overrides:
        path, equals, right = text.partition("=")
        if not equals or not path.strip():
            raise FedspanError("--set", text, "section.field=value")
        try:
            value = yaml.safe_load(right)  # YAML 1.1 reads 2e-3 as text; the field converts it
        except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise FedspanError("--set", text, "a value that is valid YAML") from None
        *sections, last = path.strip().split(".")
        place: Any = changed
        for section in sections:
            place = _inside(place, section, text)
        if isinstance(place, list):
            place[_position(place, last, text)] = value
        else:
            place[last] = value
    return changed


def _inside(place: Any, section: str, text: str) -> Any:
    """Return the value under a name in a section, or at a position in a list; create a missing section."""
    inside = place[_position(place, section, text)] if isinstance(place, list) else place.setdefault(section, {})
    if not isinstance(inside, dict | list):
        raise FedspanError("--set", text, problem=f"in {text!r}, {section} is a value, not a section")
    return inside


def _position(place: list[Any], section: str, text: str) -> int:
    if not section.isdecimal() or int(section) >= len(place):
        raise FedspanError(
            "--set",
            text,
            problem=f"in {text!r}, {section} is no position of the list",
            expected=f"a number from 0 to {len(place) - 1}",
        )
    return int(section)


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): _copied_value(value) for key, value in values.items()}


def _copied_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _copied(value)
    return [_copied_value(inner) for inner in value] if isinstance(value, list) else value
