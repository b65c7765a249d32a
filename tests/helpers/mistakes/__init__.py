"""The catalogue of mistakes: by section, what users do wrong. docs/errors.md is made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mistakes_config
import mistakes_data
import mistakes_images
import mistakes_model
import mistakes_runs
import mistakes_use
from world import Mistake

SECTIONS: Mapping[str, Sequence[Mistake]] = {
    "The configuration's file and `--set`": mistakes_config.FILES,
    "The configuration's fields": mistakes_config.FIELDS,
    "Devices": mistakes_config.DEVICES,
    "Data files": mistakes_data.FILES,
    "Columns and rows": mistakes_data.ROWS,
    "Prompts, answers, conversations": mistakes_data.PROMPTS,
    "Dividing data among clients": mistakes_data.DIVISION,
    "Naming a model": mistakes_model.NAMES,
    "A model's files": mistakes_model.FOLDERS,
    "Layers, ranks, metrics": mistakes_model.LAYERS,
    "An adapter to start from": mistakes_model.STARTS,
    "Images, convolutions, models from scratch": mistakes_images.IMAGES,
    "Run folders": mistakes_runs.FOLDERS,
    "Disks": mistakes_runs.DISK,
    "The network": mistakes_runs.NETWORK,
    "Using a model": mistakes_use.USING,
    "Exporting a model": mistakes_use.EXPORT,
    "Measuring a model": mistakes_use.EVALUATE,
}
