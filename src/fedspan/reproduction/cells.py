"""Cells of a preset: the runs of each, as configs."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedspan.config import override, parse_config
from fedspan.data import PartitionConfig
from fedspan.errors import FedspanError
from fedspan.experiments.tables import Table
from fedspan.reproduction.presets import Preset, Scale, merge

DATA, MODEL, IMAGE_MODEL = "{data}", "{model}", "{image_model}"
"""Placeholders in presets for the data folder, and for the folder of a language model or an image classifier that no
package provides."""
_AS_PUBLISHED: Mapping[str, Any] = {"federation": {"clip_ratio": None, "max_weight_ratio": None}}
"""What no paper has: replies are averaged as they are sent, by all of their examples."""
_DIVISIONS = {"dirichlet": "Dirichlet {alpha:g}", "iid": "IID", "natural": "by {column}"}


@dataclass(frozen=True)
class Cell:
    """One cell of a table."""

    name: str
    """Name of the cell and of its folder; ``all`` if there are no axes."""
    values: Mapping[str, str]
    configs: Mapping[str, Mapping[str, Any]]
    """Configs of every row, as plain values, by label."""


def list_cells(
    preset: Preset,
    scale: Scale,
    data: str | None = None,
    model: str | None = None,
    overrides: Sequence[str] = (),
) -> tuple[Cell, ...]:
    """Return all cells of a preset at a scale.

    Args:
        data: Replacement for ``{data}`` in paths; None leaves it.
        model: Replacement for ``{model}`` and ``{image_model}``; None leaves them.
        overrides: Changes to all cells, each ``section.field=value``.
    """
    axes = preset.get_axes(scale)
    published = merge(_AS_PUBLISHED, preset.config)
    base = published if scale == "full" else merge(published, preset.small.config)
    wheres = preset.where if scale == "full" else preset.small.where
    paths = {token: value for token, value in ((DATA, data), (MODEL, model), (IMAGE_MODEL, model)) if value is not None}
    cells: list[Cell] = []
    for combination in itertools.product(*(values.items() for values in axes.values())):
        values = {axis: name for axis, (name, _) in zip(axes, combination, strict=True)}
        if scale == "small" and any(_is_within(values, skipped) for skipped in preset.small.skip):
            continue
        shared = base
        for _, changes in combination:
            shared = merge(shared, changes)
        configs: dict[str, Mapping[str, Any]] = {}
        for label in preset.get_labels(scale):
            config = shared
            for patch in wheres:
                if _is_within(values, patch.cells) and (not patch.methods or label in patch.methods):
                    config = merge(config, patch.set)
            entry = preset.methods[label]
            config = merge(config, entry.set)
            if scale == "small":
                config = merge(config, preset.small.methods.get(label, {}))
            method = {**config.get("method", {}), "name": entry.key}
            configs[label] = override(_fill({**config, "method": method}, paths), overrides)
        cells.append(Cell(_build_folder_name(values.values()), values, configs))
    names = [cell.name for cell in cells]
    if len(set(names)) != len(names):
        raise FedspanError(preset.id, names, "values of axes whose names differ in letters or digits")
    return tuple(cells)


def tabulate_settings(cells: Sequence[Cell]) -> Table:
    """Tabulate the settings of each cell: at the small scale, names are the paper's but what runs differs."""
    rows: list[tuple[str, ...]] = []
    for cell in cells:
        configs = {label: parse_config(values) for label, values in cell.configs.items()}
        first = next(iter(configs.values()))
        data, model, split, cohort = first.data, first.model, first.partition, first.federation.clients_per_round
        source = data.dataset or "/".join(Path(data.train or "").parts[-2:])
        if data.max_examples is not None:
            source += f", at most {data.max_examples:,}"
        blocks = model.layers_to_transform
        layers = "all" if blocks is None else str(blocks).strip("[]")
        ranks: dict[str, list[str]] = {}
        for label, config in configs.items():
            mixed_ranks = config.federation.ranks
            row_rank = (
                getattr(config.method, "r", None) if mixed_ranks is None else json.dumps(mixed_ranks, default=str)
            )
            ranks.setdefault(str(row_rank), []).append(label)
        rows.append(
            (
                cell.name,
                source,
                _describe_partition(split),
                ("one for each value of a column" if split.partitioner == "natural" else str(split.clients))
                + ("" if cohort is None else f", {cohort} a round"),
                Path(model.name).name,
                layers,
                "; ".join(
                    rank if len(ranks) == 1 else f"{rank} ({', '.join(labels)})" for rank, labels in ranks.items()
                ),
                str(first.federation.rounds),
            )
        )
    head = ("cell", "data", "partition", "clients", "model", "layers", "rank", "rounds")
    return Table(head, tuple(rows), None, ())


def _describe_partition(config: PartitionConfig) -> str:
    text = _DIVISIONS.get(config.partitioner, config.partitioner).format(alpha=config.alpha, column=config.column)
    return text if config.column is None or config.partitioner == "natural" else f"{text} within each {config.column}"


def name_row_folders(labels: Iterable[str]) -> dict[str, str]:
    """Name a folder for each row, numbered if two names would be equal (FedGaLore and the paper's FedGaLore-)."""
    names: dict[str, str] = {}
    for label in labels:
        name = _build_folder_name([label])
        numbered = (f"{name}-{number}" for number in itertools.count(2))
        names[label] = next(
            candidate for candidate in itertools.chain([name], numbered) if candidate not in names.values()
        )
    return names


def _build_folder_name(values: Iterable[str]) -> str:
    """Build a folder name from labels: letters, digits and dots stay, everything else becomes dashes."""
    return "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", value).strip("-").lower() for value in values) or "all"


def _is_within(values: Mapping[str, str], cells: Mapping[str, Sequence[str]]) -> bool:
    """Return whether a cell is one of these cells; an axis left out matches every value."""
    return all(values[axis] in names for axis, names in cells.items())


def _fill(value: Any, paths: Mapping[str, str]) -> Any:
    """Replace the placeholders in the texts of plain values."""
    if isinstance(value, Mapping):
        return {key: _fill(inner, paths) for key, inner in value.items()}
    if isinstance(value, list):
        return [_fill(inner, paths) for inner in value]
    if isinstance(value, str):
        for token, text in paths.items():
            value = value.replace(token, text)
    return value
