"""Random changes of training images: a shifted crop, a mirror image, another brightness and contrast.

They are those of torchvision's ``RandomCrop`` with padding, ``RandomHorizontalFlip`` and ``ColorJitter``, whose draws
cannot be keyed. Shapes: H rows, W columns.

Deviations: brightness changes before contrast, where torchvision draws the order; values are not rounded to bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Generator, Tensor
from torch.nn import functional as F

__all__ = ["ImageOptions", "augment"]

_GRAY = torch.tensor([0.2989, 0.587, 0.114]).reshape(3, 1, 1)
"""Weights of red, green and blue in a gray value (ITU-R BT.601, as torchvision rounds them)."""


@dataclass(frozen=True)
class ImageOptions:
    """Options of image classification: random changes of each training image, none by default.

    Args:
        crop_padding: Pixels by which an image is at most shifted in each direction; what is shifted in is black.
        flip: Probability with which left and right are exchanged.
        brightness: The image is multiplied by a factor between 1 - ``brightness`` and 1 + ``brightness``.
        contrast: Differences from the image's mean gray value are multiplied by a factor between 1 - ``contrast`` and
            1 + ``contrast``.
    """

    crop_padding: Annotated[int, Field(ge=0)] = 0
    flip: Annotated[float, Field(ge=0, le=1)] = 0.0
    brightness: Annotated[float, Field(ge=0, le=1)] = 0.0
    contrast: Annotated[float, Field(ge=0, le=1)] = 0.0


def augment(pixels: Tensor, options: ImageOptions, generator: Generator) -> Tensor:
    """Change an image at random.

    Args:
        pixels: Values from 0 to 255, uint8, (3, H, W).
        options: The changes.
        generator: Generator of the draws, of which every image takes the same number.

    Returns:
        Values from 0 to 255, float32, (3, H, W).
    """
    height, width = pixels.shape[1:]
    padding = options.crop_padding
    top, left = torch.randint(2 * padding + 1, (2,), generator=generator).tolist()
    flip, brightness, contrast = torch.rand(3, generator=generator).tolist()
    changed = F.pad(pixels.float(), [padding] * 4)[:, top : top + height, left : left + width]
    if flip < options.flip:
        changed = changed.flip(2)
    changed = (changed * _scale(brightness, options.brightness)).clamp(0, 255)
    gray, factor = (changed * _GRAY).sum(0).mean(), _scale(contrast, options.contrast)
    return (factor * changed + (1 - factor) * gray).clamp(0, 255)


def _scale(draw: float, strength: float) -> float:
    """Return the factor between 1 - strength and 1 + strength for a draw between 0 and 1."""
    return 1 + strength * (2 * draw - 1)
