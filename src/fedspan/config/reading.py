"""Reading a configuration: YAML, overrides, plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedspan.config.run import RunConfig
from fedspan.config.validation_errors import convert_validation_errors
from fedspan.errors import FedspanError, suggest_nearest

ConfigLike = RunConfig | Mapping[str, Any] | str | Path

_MAX_DEPTH = 20
"""Depth of nested sections and lists that a config may have; the deepest field is far above."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader within bounds: a short text could take forever to parse or to copy.

    Its time grows with a text's length times its depth, and aliases of aliases stand for exponentially many values.
    """

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"it has an alias (*{self.peek_event().anchor}). Write the value in each place")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise yaml.YAMLError(f"it is nested more than {_MAX_DEPTH} levels deep")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def load_yaml(text: str | bytes) -> Any:
    """Return the plain values in a YAML text, of any author.

    Raises:
        ValueError: If it is not valid YAML, or nested too deeply, or has aliases.
    """
    try:
        return yaml.load(text, _Loader)
    # ValueError: a date with month 13. The parser itself raises the others, on texts such as "? [" and "!!int _".
    except (yaml.YAMLError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(str(error) or type(error).__name__) from error


def parse_config(values: Mapping[str, Any]) -> RunConfig:
    """Parse a config from plain values."""
    with convert_validation_errors(root=RunConfig):
        return RunConfig.model_validate(values)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load a config from a YAML file and ``a.b=c`` overrides.

    Returns:
        The checked config, with defaults for all fields that the file leaves out.

    Examples:
        >>> fedspan.load_config("config.yaml", ["federation.rounds=20"]).federation.rounds
        20

    Raises:
        FedspanError: If the file is missing, unreadable or no YAML mapping, or for the first mistake in it.
    """
    return parse_config(override(read_values(path), overrides))


def read_values(path: str | Path) -> dict[str, Any]:
    """Read the plain values in a config's YAML file, without validation."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        problem = f"there is no file {str(path)!r}. {_suggest_configs(path)}"
        raise FedspanError("config", str(path), problem=problem) from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with a zero byte
        raise FedspanError(
            "config", str(path), problem=f"{str(path)!r} cannot be read as a YAML file ({error})"
        ) from None
    return parse_yaml(text, str(path))


def _suggest_configs(path: Path) -> str:
    """Return a sentence with the YAML files of a missing file's folder that have similar names."""
    try:
        names = [file.name for file in path.parent.iterdir() if file.suffix in (".yaml", ".yml")]
    except OSError:
        return f"The folder {path.parent} does not exist or cannot be read."
    return suggest_nearest(path.name, names) or "Write a config with: fedspan init DATA --out my.yaml"


def parse_yaml(text: str, source: str) -> dict[str, Any]:
    """Parse the plain values in the text of a config, without validation."""
    try:
        values = load_yaml(text)
    except ValueError as error:
        raise FedspanError("config", source, problem=f"{source!r} is not valid YAML ({error})") from None
    if not isinstance(values, dict):
        raise FedspanError(
            "config",
            source,
            "a YAML mapping with the sections model, data, method, ...",
            problem=f"{source!r} holds no mapping. To write a config for a file of data, run: fedspan init FILE",
        )
    return values


def override(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply ``a.b=c`` overrides to a copy of ``values``, in order; ``c`` is YAML (``[1, 2]``, ``true``, ``null``)."""
    try:
        changed: dict[str, Any] = _copy_section(values)
    except RecursionError:
        raise FedspanError("config", None, problem="a section contains itself") from None
    for text in overrides:
        path, separator, value_text = text.partition("=")
        if not separator or not path.strip():
            raise FedspanError("--set", text, "section.field=value")
        try:
            value = load_yaml(value_text)  # YAML 1.1 reads 2e-3 as text; the field converts it
        except ValueError:
            raise FedspanError("--set", text, "a value that is valid YAML") from None
        *sections, last = path.strip().split(".")
        node: Any = changed
        for section in sections:
            node = _get_section(node, section, text)
        if isinstance(node, list):
            node[_parse_index(node, last, text)] = value
        else:
            node[last] = value
    return changed


def to_plain_values(config: ConfigLike, overrides: Sequence[str]) -> dict[str, Any]:
    """Return a config's values with overrides, not validated: they may hold options that only some methods have."""
    if isinstance(config, RunConfig):
        config = config.model_dump(mode="json")
    return override(config if isinstance(config, Mapping) else read_values(config), overrides)


def _get_section(node: Any, section: str, text: str) -> Any:
    """Return the value under a name in a section, or at a position in a list; create a section that is missing or null.

    A run's own config.yaml has null for every section that it does not use.
    """
    key: Any = _parse_index(node, section, text) if isinstance(node, list) else section
    if not isinstance(node, list) and node.get(section) is None:
        node[section] = {}
    child = node[key]
    if not isinstance(child, dict | list):
        raise FedspanError("--set", text, problem=f"in {text!r}, {section} is a value, not a section")
    return child


def _parse_index(node: list[Any], section: str, text: str) -> int:
    if not section.isdecimal() or int(section) >= len(node):
        raise FedspanError(
            "--set",
            text,
            problem=f"in {text!r}, {section} is not a position in the list",
            expected=f"a number from 0 to {len(node) - 1}",
        )
    return int(section)


def _copy_section(values: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): _copy_value(value) for key, value in values.items()}


def _copy_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _copy_section(value)
    return [_copy_value(inner) for inner in value] if isinstance(value, list) else value
