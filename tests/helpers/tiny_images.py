"""Image models, and pictures in three colors, so small that a test can train on them.

``vit`` (8 x 12 pixels in patches of 4), ``resnet`` (Hugging Face's, two stages, 10 x 14 pixels) and the pictures in a
folder ``pictures/site/color/number.png`` of 9 x 7 pixels or thereabouts. ``resnet`` has been trained for five other
classes, as published image models have.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import nn
from transformers import AutoImageProcessor, AutoModelForImageClassification

from fedspan.config import RunConfig, parse_config

from . import tiny

COLORS = ("blue", "green", "red")
SITES = {"east": 9, "north": 15, "west": 27}
"""Clients of the pictures with their number of pictures."""
TARGETS: Mapping[str, list[str]] = {
    "vit": ["q_proj", "v_proj", "fc1", "projection"],
    "resnet": ["convolution"],
    "builtin:resnet-8": ["conv1", "conv2"],
}
SIZES = {"vit": (8, 12), "resnet": (10, 14)}
_MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "vit": lambda: transformers.ViTModel(
        transformers.ViTConfig(
            **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"image_size": SIZES["vit"], "patch_size": 4, "initializer_range": 0.2},
        ),
        add_pooling_layer=False,
    ),
    "resnet": lambda: transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            **{"embedding_size": 6, "hidden_sizes": [6, 10], "depths": [1, 2], "layer_type": "basic", "num_labels": 5}
        )
    ),
}


def save_model(kind: str, folder: Path) -> Path:
    """A model and its processor in a folder of its own; the same weights and statistics every time."""
    path = folder / kind
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = _MODELS[kind]()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean = 0.1 * torch.randn_like(module.running_mean)
                module.running_var = 1 + torch.rand_like(module.running_var)
                module.num_batches_tracked = torch.tensor(40)
        model.save_pretrained(path)
    height, width = SIZES[kind]
    transformers.ViTImageProcessorPil(
        size={"height": height, "width": width}, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.25]
    ).save_pretrained(path)
    return path


def picture(color: str, rng: np.random.Generator) -> Image.Image:
    """Noise in which one color is brighter; no two sizes need be equal."""
    pixels = rng.integers(0, 130, (int(rng.integers(6, 9)), int(rng.integers(8, 11)), 3), np.uint8)
    pixels[:, :, ("red", "green", "blue").index(color)] += 90
    return Image.fromarray(pixels)


def save_pictures(folder: Path) -> Path:
    """51 pictures of three colors at three sites, one folder each."""
    rng, root = np.random.default_rng(0), folder / "pictures"
    for site, size in SITES.items():
        for number in range(size):
            color = COLORS[number % 3]
            path = root / site / color / f"{number:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture(color, rng).save(path)
    return root


def settings(folder: Path, kind: str = "vit", **changes: Mapping[str, Any]) -> dict[str, Any]:
    """A run on a tiny model and the pictures as plain values; ``changes`` go into its sections."""
    name, size = (kind, {"image_size": 9}) if kind.startswith("builtin:") else (str(folder / kind), {})
    values: dict[str, Any] = {
        "task": "image-classification",
        "seed": 3,
        "device": "cpu",
        "model": {"name": name, "target_modules": TARGETS[kind], **size},
        "data": {"train": str(folder / "pictures"), "test_fraction": 0.2},
        "partition": {"partitioner": "natural", "column": "domain"},
        "method": {"name": "fedit", "r": 2, "lora_alpha": 4},
        "federation": {"rounds": 2},
        "training": {"lr": 0.02, "local_steps": 2, "batch_size": 5},
        "evaluation": {"batch_size": 32},
        "engine": {"name": "loop"},
    }
    if kind == "resnet":
        values["model"]["modules_to_save"] = ["normalization"]
    return tiny.change_sections(values, changes)


def config(folder: Path, kind: str = "vit", **changes: Mapping[str, Any]) -> RunConfig:
    """``settings``, parsed."""
    return parse_config(settings(folder, kind, **changes))


def fresh_classifier(folder: str | Path) -> nn.Module:
    """The pretrained model with a random head for the colors, as somebody without fedspan loads it."""
    with torch.random.fork_rng():
        torch.manual_seed(6)
        model = AutoModelForImageClassification.from_pretrained(
            folder, num_labels=len(COLORS), ignore_mismatched_sizes=True
        )
    return model.eval()


def pixels(folder: str | Path, paths: list[Path]) -> torch.Tensor:
    """What a model's own processor makes of files, as somebody without fedspan uses it."""
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    images = [Image.open(path).convert("RGB") for path in paths]
    return processor(images, return_tensors="pt")["pixel_values"]
