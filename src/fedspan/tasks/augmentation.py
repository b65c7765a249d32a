"""Random changes of training images: a shifted crop, a mirror image, another brightness and contrast.

They are those of torchvision's ``RandomCrop`` with padding, ``RandomHorizontalFlip`` and ``ColorJitter``, whose draws
cannot be keyed. Shapes: B images, H rows, W columns.

Deviations: brightness changes before contrast, where torchvision draws the order; values are not rounded to bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Generator, Tensor

from fedspan.core.tensors import to_device

_GRAY = torch.tensor([0.2989, 0.587, 0.114]).reshape(3, 1, 1)
"""Weights of red, green and blue in a gray value (ITU-R BT.601, as torchvision rounds them)."""


@dataclass(frozen=True)
class ImageOptions:
    """Options of image classification: random changes of each training image, none by default.

    Args:
        crop_padding: Pixels by which an image is at most shifted in each direction, fewer than it has; what is shifted
            in is black.
        flip: Probability with which left and right are exchanged.
        brightness: The image is multiplied by a factor between 1 - ``brightness`` and 1 + ``brightness``.
        contrast: Differences from the image's mean gray value are multiplied by a factor between 1 - ``contrast`` and
            1 + ``contrast``.
    """

    crop_padding: Annotated[int, Field(ge=0)] = 0
    flip: Annotated[float, Field(ge=0, le=1)] = 0.0
    brightness: Annotated[float, Field(ge=0, le=1)] = 0.0
    contrast: Annotated[float, Field(ge=0, le=1)] = 0.0


def augment(pixels: Tensor, options: ImageOptions, generators: Sequence[Generator]) -> Tensor:
    """Change images at random, on their device.

    Args:
        pixels: Values from 0 to 255, uint8, (B, 3, H, W).
        options: The changes.
        generators: Generator of each image's draws, on the CPU; every image takes the same number of draws.

    Returns:
        Values from 0 to 255, float32, (B, 3, H, W).
    """
    padding = options.crop_padding
    shifts = [torch.randint(2 * padding + 1, (2,), generator=generator) - padding for generator in generators]
    draws = [torch.rand(3, generator=generator) for generator in generators]
    changed = pixels.float()
    if padding:
        changed = _shift(changed, to_device(torch.stack(shifts), pixels.device))
    flips_B, brightness_B, contrast_B = to_device(torch.stack(draws), pixels.device).reshape(-1, 3, 1, 1, 1).unbind(1)
    if options.flip:
        changed = torch.where(flips_B < options.flip, changed.flip(3), changed)
    if options.brightness:
        changed = (changed * _scale(brightness_B, options.brightness)).clamp(0, 255)
    if options.contrast:
        gray_B = (changed * to_device(_GRAY, pixels.device)).sum(1).mean((1, 2)).reshape(-1, 1, 1, 1)
        factors_B = _scale(contrast_B, options.contrast)
        changed = (factors_B * changed + (1 - factors_B) * gray_B).clamp(0, 255)
    return changed.contiguous()


def _shift(pixels: Tensor, shifts_B2: Tensor) -> Tensor:
    """Return the crops that begin some rows and columns after the images do, or before, with zeros outside of them."""
    count, _, height, width = pixels.shape
    rows_BH = torch.arange(height, device=pixels.device) + shifts_B2[:, :1]
    columns_BW = torch.arange(width, device=pixels.device) + shifts_B2[:, 1:]
    is_inside_BH, is_inside_BW = (rows_BH >= 0) & (rows_BH < height), (columns_BW >= 0) & (columns_BW < width)
    images_B = torch.arange(count, device=pixels.device).reshape(-1, 1, 1)
    rows_BH, columns_BW = rows_BH.clamp(0, height - 1), columns_BW.clamp(0, width - 1)
    shifted = pixels.permute(0, 2, 3, 1)[images_B, rows_BH[:, :, None], columns_BW[:, None, :]]
    return (shifted * (is_inside_BH[:, :, None] & is_inside_BW[:, None, :])[..., None]).permute(0, 3, 1, 2)


def _scale(draws: Tensor, strength: float) -> Tensor:
    """Return the factors between 1 - strength and 1 + strength for draws between 0 and 1."""
    return 1 + strength * (2 * draws - 1)
