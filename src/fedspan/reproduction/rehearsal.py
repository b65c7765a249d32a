"""Cost of reproducing a paper's table, row by row, estimated before anything is read or downloaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from fedspan.config import RunConfig, parse_config
from fedspan.planning.estimate import get_known_examples, get_known_labels
from fedspan.planning.plan import Plan, PlannedModel, plan_run, prepare_model
from fedspan.reproduction.cells import list_cells
from fedspan.reproduction.presets import Scale, load_preset, read_architectures, require_scale


@dataclass(frozen=True)
class PlannedCell:
    """Cost of one run of one row in one cell; a sweep and several seeds multiply it."""

    cell: str
    method: str
    runs: int
    """Number of its runs, including those of the sweep."""
    plan: Plan


def dry_run(id: str, *, scale: Scale = "small", overrides: Sequence[str] = ()) -> tuple[PlannedCell, ...]:
    """Estimate the cost of a preset, row by row; neither weights nor data are read or downloaded.

    Args:
        id: Id of the preset.
        scale: ``small`` or ``full``.
        overrides: Changes to all configs, each ``section.field=value``.

    Returns:
        One entry for each row of each cell, with its plan.

    Examples:
        >>> rows = fedspan.dry_run("rolora-table1", scale="full")

    Raises:
        FedspanError: If the preset or scale is unknown, or an override does not fit.
    """
    preset = load_preset(id)
    require_scale(scale)
    count = 1
    for values in preset.get_candidates(scale, "best", overrides).values():
        count *= len(values)
    # the best run of the sweep counts as that of the first seed, unless all have to be timed
    swept = count - (not preset.timed) if count > 1 else 0
    runs = swept + len(preset.get_seeds(scale))
    planned_cells: list[PlannedCell] = []
    for cell in list_cells(preset, scale, overrides=overrides):
        for label, values in cell.configs.items():
            config = parse_config(values)
            # in a natural partition, the data determine the clients; a preset states how many it expects
            clients = config.partition.clients
            planned = plan_run(config, _prepare_model(config), clients=clients, examples=get_known_examples(config))
            planned_cells.append(PlannedCell(cell.name, label, runs, planned))
    return tuple(planned_cells)


_models: dict[str, PlannedModel] = {}
"""Models without weights, which use no memory, by the settings that determine them: many rows share one."""


def _prepare_model(config: RunConfig) -> PlannedModel:
    labels = get_known_labels(config)
    section = config.model.model_dump(mode="json", exclude={"extras", "extras_lr_scale"})
    key = json.dumps([config.task, config.device, config.data.packing, labels, section], sort_keys=True)
    if key not in _models:
        _models[key] = prepare_model(config, labels, read_architectures().get(config.model.name))
    return _models[key]
