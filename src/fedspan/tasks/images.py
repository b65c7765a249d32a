"""Image classification: one label for an image.

Images are decoded, turned to RGB and resized once, by the model's own image processor, and kept as bytes; scaling and
normalisation happen batch by batch. Shapes: N images, 3 colours, H rows, W columns.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import datasets
import numpy as np
import PIL.Image
import torch
from torch import Tensor, nn

from fedspan.errors import FedspanError
from fedspan.tasks.labelling import Labelling

__all__ = ["EncodedImages", "ImageClassification"]

_CHUNK = 256


@dataclass(frozen=True)
class EncodedImages:
    """Images of one size with their labels.

    Args:
        pixels: uint8, (N, 3, H, W).
        labels: index into the label list, int64, (N,).
        lengths: all 1: every image costs the same; int64, (N,).
    """

    pixels: np.ndarray
    labels: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


class ImageClassification(Labelling):
    """One label for an image, with any Hugging Face model that has an image classification head.

    Args:
        processor: the model's image processor.
        labels: names by index.
        metric: by which rounds are compared.
    """

    def __init__(self, processor: Any, labels: Sequence[str], metric: str = "accuracy") -> None:
        super().__init__(labels, metric)
        self.processor = processor
        self._scale = float(processor.rescale_factor) if processor.do_rescale else 1.0
        normalised = processor.do_normalize
        self._mean = torch.tensor(processor.image_mean if normalised else 0.0).reshape(-1, 1, 1)
        self._std = torch.tensor(processor.image_std if normalised else 1.0).reshape(-1, 1, 1)

    def encode(self, dataset: datasets.Dataset) -> EncodedImages:
        """Decode and resize a data set with columns ``image`` and ``label`` (indices), once.

        Raises:
            FedspanError: an image that can't be decoded, or images that the processor leaves at different sizes.
        """
        stored = dataset.select_columns(["image"]).cast_column("image", datasets.Image(decode=False))
        chunks: list[np.ndarray] = []
        for start in range(0, len(stored), _CHUNK):
            rows = cast(list[Mapping[str, Any]], stored[start : start + _CHUNK]["image"])
            images = [_decoded(row, start + at) for at, row in enumerate(rows)]
            chunks.append(self._resized(images))
        if len({chunk.shape[1:] for chunk in chunks}) != 1:
            raise _different_sizes()
        labels = np.array(dataset["label"], dtype=np.int64)
        return EncodedImages(np.concatenate(chunks), labels, np.ones(len(labels), np.int64))

    def _resized(self, images: list[PIL.Image.Image]) -> np.ndarray:
        try:
            made = self.processor(images, do_rescale=False, do_normalize=False, return_tensors="np")
            return np.asarray(made["pixel_values"], dtype=np.uint8)
        except ValueError as error:  # NumPy's, of rows that differ
            raise _different_sizes() from error

    def batch(self, examples: EncodedImages, indices: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        """``pixel_values``, (batch, 3, H, W) as the model's processor makes them, and ``labels``."""
        chosen = list(indices)
        pixels = torch.from_numpy(examples.pixels[chosen]).to(device, torch.float32)
        scaled = (pixels * self._scale - self._mean.to(device)) / self._std.to(device)
        return {"pixel_values": scaled, "labels": torch.from_numpy(examples.labels[chosen]).to(device)}

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor], *, thorough: bool = False) -> Tensor:
        """Logits, (images, labels)."""
        pixels = batch["pixel_values"]
        return model(pixel_values=pixels.to(getattr(model, "dtype", pixels.dtype))).logits

    def remarks(self, examples: EncodedImages) -> tuple[str, ...]:
        """None: no image is cut."""
        return ()


def _decoded(row: Mapping[str, Any], number: int) -> PIL.Image.Image:
    try:
        with PIL.Image.open(io.BytesIO(row["bytes"]) if row["bytes"] else row["path"]) as image:
            return image.convert("RGB")
    # Pillow raises SyntaxError and struct.error (a ValueError's sibling) of some damaged files, too.
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        expected = f"an image that Pillow can decode ({error})"
        raise FedspanError("data", row["path"] or f"image {number + 1}", expected) from None


def _different_sizes() -> FedspanError:
    return FedspanError("model.image_size", None, "a number of pixels: as they are, the images differ in size")
