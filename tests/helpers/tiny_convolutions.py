"""A network of three convolutions that differ in all that a convolution may differ in, and pictures for it.

``pretrained`` weights are random. Its layers, (O, C k1 k2): ``tall``, a 3 x 1 kernel in steps of two, (5, 9); ``wide``,
2 x 3 in steps of one and two, (6, 30); ``point``, 1 x 1, (7, 6).
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForImageClassification, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutput

LAYERS = ["tall", "wide", "point"]
COLORS = ("blue", "green", "red")
SITES = {"east": 6, "north": 9, "south": 12, "west": 21}
"""Clients of the pictures with their number of pictures."""
SIDE = 7


class ThreeConvolutionsConfig(PreTrainedConfig):
    """Nothing but the labels."""

    model_type = "tiny-convolutions"


class ThreeConvolutions(PreTrainedModel):
    """The network with its classifier."""

    config_class = ThreeConvolutionsConfig
    base_model_prefix = "body"
    main_input_name = "pixel_values"

    def __init__(self, config: ThreeConvolutionsConfig) -> None:
        super().__init__(config)
        self.tall = nn.Conv2d(3, 5, (3, 1), 2, (1, 0))
        self.wide = nn.Conv2d(5, 6, (2, 3), (1, 2), (0, 1), bias=False)
        self.point = nn.Conv2d(6, 7, 1)
        self.classifier = nn.Linear(7, config.num_labels)
        self.post_init()

    def forward(self, pixel_values: Tensor, **_: object) -> ImageClassifierOutput:
        """Logits of images, (N, 3, H, W) -> (N, labels)."""
        h = self.point(F.gelu(self.wide(F.gelu(self.tall(pixel_values)))))
        logits: Any = self.classifier(h.mean((2, 3)))
        return ImageClassifierOutput(logits=logits)


AutoConfig.register(ThreeConvolutionsConfig.model_type, ThreeConvolutionsConfig, exist_ok=True)
AutoModelForImageClassification.register(ThreeConvolutionsConfig, ThreeConvolutions, exist_ok=True)


def save_model(folder: Path) -> Path:
    """The network and its processor in a folder of its own; the same weights every time."""
    path = folder / "convolutions"
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = ThreeConvolutions(ThreeConvolutionsConfig(num_labels=len(COLORS)))
        for name in LAYERS:
            nn.init.kaiming_normal_(model.get_submodule(name).weight)
        nn.init.normal_(model.classifier.weight)
        model.save_pretrained(path)
    transformers.ViTImageProcessorPil(size={"height": SIDE, "width": SIDE}).save_pretrained(path)
    return path


def save_pictures(folder: Path) -> Path:
    """Noise in which one color is brighter, ``pictures/site/color/number.png``."""
    rng, root = np.random.default_rng(0), folder / "pictures"
    for site, size in SITES.items():
        for number in range(size):
            color = number % len(COLORS)
            pixels = rng.integers(0, 130, (SIDE, SIDE, 3), np.uint8)
            pixels[:, :, 2 - color] += 90
            path = root / site / COLORS[color] / f"{number:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    return root
