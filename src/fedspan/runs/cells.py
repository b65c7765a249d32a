"""The cells of a preset: which runs it takes, each as a config."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedspan.config import override
from fedspan.errors import FedspanError
from fedspan.runs.presets import Preset, Scale, Where, merged

__all__ = ["DATA", "MODEL", "Cell", "cells_of"]

DATA, MODEL = "{data}", "{model}"
"""What stands in presets for the folder with the data, and for the folder with a model that no package brings."""


@dataclass(frozen=True)
class Cell:
    """One cell of a table.

    Args:
        name: of its folder, too; ``all`` if there are no axes.
        values: by axis.
        configs: of every row, as plain values, by label.
    """

    name: str
    values: Mapping[str, str]
    configs: Mapping[str, Mapping[str, Any]]


def cells_of(
    preset: Preset,
    scale: Scale,
    data: str | None = None,
    model: str | None = None,
    overrides: Sequence[str] = (),
) -> tuple[Cell, ...]:
    """All cells of a preset at a scale.

    Args:
        preset: the table.
        scale: ``full`` or ``small``.
        data: takes the place of ``{data}`` in paths; None leaves it.
        model: takes the place of ``{model}``; None leaves it.
        overrides: ``section.field=value``, over all cells.

    Raises:
        FedspanError: for an override that is none.
    """
    axes = preset.axes_at(scale)
    base = preset.config if scale == "full" else merged(preset.config, preset.small.config)
    wheres = preset.where if scale == "full" else preset.small.where
    given = {token: value for token, value in ((DATA, data), (MODEL, model)) if value is not None}
    cells: list[Cell] = []
    for chosen in itertools.product(*(values.items() for values in axes.values())):
        values = {axis: name for axis, (name, _) in zip(axes, chosen, strict=True)}
        shared = base
        for _, changes in chosen:
            shared = merged(shared, changes)
        configs: dict[str, Mapping[str, Any]] = {}
        for label in preset.labels_at(scale):
            config = shared
            for where in wheres:
                if _applies(where, values, label):
                    config = merged(config, where.set)
            entry = preset.methods[label]
            config = merged(config, entry.set)
            if scale == "small":
                config = merged(config, preset.small.methods.get(label, {}))
            method = {**config.get("method", {}), "name": entry.key}
            configs[label] = override(_filled({**config, "method": method}, given), overrides)
        cells.append(Cell(folder_name(values.values()), values, configs))
    names = [cell.name for cell in cells]
    if len(set(names)) != len(names):
        raise FedspanError(preset.id, names, "values of axes whose names differ in letters or digits")
    return tuple(cells)


def folder_name(values: Any) -> str:
    """A name of a folder from labels: letters, digits and dots, the rest as dashes."""
    return "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", value).strip("-").lower() for value in values) or "all"


def _applies(where: Where, values: Mapping[str, str], label: str) -> bool:
    fits = all(values[axis] in names for axis, names in where.cells.items())
    return fits and (not where.methods or label in where.methods)


def _filled(value: Any, given: Mapping[str, str]) -> Any:
    """Plain values with the tokens in their texts replaced."""
    if isinstance(value, Mapping):
        return {key: _filled(inner, given) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, given) for inner in value]
    if isinstance(value, str):
        for token, text in given.items():
            value = value.replace(token, text)
    return value
