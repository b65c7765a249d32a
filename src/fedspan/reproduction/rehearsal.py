"""What playing a paper's table again will take, row by row, before anything is read or downloaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from fedspan.config import RunConfig, parse_config
from fedspan.planning.estimate import known_examples, known_labels
from fedspan.planning.plan import Plan, PlannedModel, plan_run, planned_model
from fedspan.reproduction.cells import cells_of
from fedspan.reproduction.presets import Scale, architectures, preset_of, require_scale

__all__ = ["PlannedCell", "dry_run"]


@dataclass(frozen=True)
class PlannedCell:
    """What one row in one cell will take, once; a sweep and several seeds take as many times that.

    Args:
        cell: its name.
        method: label of the row.
        runs: how many runs there are of it, the sweep's among them.
        plan: of one of them.
    """

    cell: str
    method: str
    runs: int
    plan: Plan


def dry_run(id: str, *, scale: Scale = "small", overrides: Sequence[str] = ()) -> tuple[PlannedCell, ...]:
    """What a preset will take, row by row; neither weights nor data are read or downloaded.

    Args:
        id: of the preset.
        scale: ``small`` or ``full``.
        overrides: changes to all configs, each ``section.field=value``.

    Raises:
        FedspanError: no such preset or scale, or an override that does not fit.
    """
    preset = preset_of(id)
    require_scale(scale)
    tried = 1
    for values in preset.sweep_at(scale).values():
        tried *= len(values)
    # the sweep's best is the first of the seeds, unless all have to be timed
    swept = tried - (not preset.timed) if tried > 1 else 0
    runs = swept + len(preset.seeds_at(scale))
    found: list[PlannedCell] = []
    for cell in cells_of(preset, scale, overrides=overrides):
        for label, values in cell.configs.items():
            config = parse_config(values)
            # of a natural partition the data decide; a preset says how many clients it expects
            clients = config.partition.clients
            planned = plan_run(config, _planned_model(config), clients=clients, examples=known_examples(config))
            found.append(PlannedCell(cell.name, label, runs, planned))
    return tuple(found)


_models: dict[str, PlannedModel] = {}
"""Models without weights, which hold nothing, by what they follow from: many rows share one."""


def _planned_model(config: RunConfig) -> PlannedModel:
    labels = known_labels(config)
    section = config.model.model_dump(mode="json", exclude={"extras", "extras_lr_scale"})
    key = json.dumps([config.task, config.device, config.data.packing, labels, section], sort_keys=True)
    if key not in _models:
        _models[key] = planned_model(config, labels, architectures().get(config.model.name))
    return _models[key]
