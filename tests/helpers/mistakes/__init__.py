"""The catalogue of mistakes: by section, what users do wrong. docs/errors.md is made of it."""

from collections.abc import Mapping, Sequence

from ..mistakes import config, data, images, model, runs, use
from ..mistakes.world import Mistake

SECTIONS: Mapping[str, Sequence[Mistake]] = {
    "The configuration's file and `--set`": config.FILES,
    "The configuration's fields": config.FIELDS,
    "Devices": config.DEVICES,
    "Data files": data.FILES,
    "Columns and rows": data.ROWS,
    "Prompts, answers, conversations": data.PROMPTS,
    "Partitioning data among clients": data.PARTITION,
    "Naming a model": model.NAMES,
    "A model's files": model.FOLDERS,
    "Layers, ranks, metrics": model.LAYERS,
    "An adapter to start from": model.STARTS,
    "Images, convolutions, models from scratch": images.IMAGES,
    "Run folders": runs.FOLDERS,
    "Disks": runs.DISK,
    "The network": runs.NETWORK,
    "Using a model": use.USING,
    "Exporting a model": use.EXPORT,
    "Measuring a model": use.EVALUATE,
}
