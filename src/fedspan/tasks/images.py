"""Image classification: one label for an image.

Images are decoded, turned upright, converted to RGB and resized once, by the model's own image processor, and stored as
bytes; random changes in training (``augment``), scaling and normalization happen batch by batch. Shapes: N images,
3 colors, H rows, W columns.

The changes are those of torchvision's ``RandomCrop`` with padding, ``RandomHorizontalFlip`` and ``ColorJitter``, whose
draws cannot be keyed. Deviations: brightness changes before contrast, where torchvision draws the order; values are not
rounded to bytes.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from fedspan.core.tensors import create_example_generators, to_device
from fedspan.data.columns import ColumnReader, ReadColumns, TaskColumns
from fedspan.data.config import DataConfig
from fedspan.data.images import MAX_PIXELS, decode_image, find_readable_images
from fedspan.errors import FedspanError
from fedspan.tasks.definition import TaskDefinition
from fedspan.tasks.encoding import require_processor
from fedspan.tasks.losses import get_logits
from fedspan.tasks.single_label import SingleLabelClassification

if TYPE_CHECKING:
    import datasets
    import PIL.Image

    from fedspan.tasks.settings import TaskSettings

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


def augment(pixels: Tensor, options: ImageOptions, generators: Sequence[torch.Generator]) -> Tensor:
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


_CHUNK = 256
"""Maximum number of images that are resized together."""
_CHUNK_PIXELS = MAX_PIXELS
"""Maximum number of their pixels, unless it is one image."""


@dataclass(frozen=True)
class EncodedImages:
    """Images of one size with their labels."""

    pixels: np.ndarray
    """Pixel values, uint8, (N, 3, H, W)."""
    labels: np.ndarray
    """Indices into the label list, int64, (N,)."""
    lengths: np.ndarray
    """Costs of the images, all 1 since they are equal; int64, (N,)."""

    def __len__(self) -> int:
        return len(self.labels)


class ImageClassification(SingleLabelClassification):
    """Prediction of one label for an image, with any Hugging Face image classifier."""

    def __init__(self, processor: Any, labels: Sequence[str], metric: str = "accuracy", advice: str = "") -> None:
        super().__init__(labels, metric)
        self._advice = advice
        require_processor(processor, "images")
        self.processor = processor
        if not all(hasattr(processor, name) for name in ("do_rescale", "do_normalize")):
            raise _build_processor_error(processor)
        self._scale = float(processor.rescale_factor) if processor.do_rescale else 1.0
        normalized = processor.do_normalize
        self._mean = torch.tensor(processor.image_mean if normalized else 0.0).reshape(-1, 1, 1)
        self._std = torch.tensor(processor.image_std if normalized else 1.0).reshape(-1, 1, 1)

    def encode(self, dataset: datasets.Dataset) -> EncodedImages:
        """Decode and resize a data set with columns ``image`` and ``label`` (indices), once."""
        import datasets

        stored = dataset.select_columns(["image"]).cast_column("image", datasets.Image(decode=False))
        chunks: list[np.ndarray] = []
        rows = (row for start in range(0, len(stored), _CHUNK) for row in stored[start : start + _CHUNK]["image"])
        for images in _split(self._decode(row, number) for number, row in enumerate(rows)):
            chunks.append(self._resize(images))
            if len(chunks) == 1:
                self._require_equal_scaling(images[0], chunks[0][:1])
        if len({chunk.shape[1:] for chunk in chunks}) != 1:
            raise _build_size_error()
        labels = np.array(dataset["label"], dtype=np.int64)
        return EncodedImages(np.concatenate(chunks), labels, np.ones(len(labels), np.int64))

    def _decode(self, row: Mapping[str, Any], number: int) -> PIL.Image.Image:
        try:
            return decode_image(row)
        except ValueError as error:
            image = row["path"] or f"image {number + 1}"
            problem = f"Pillow cannot decode {image} ({error}). {self._advice}"
            raise FedspanError("data", image, problem=problem) from None

    def _resize(self, images: list[PIL.Image.Image]) -> np.ndarray:
        pixels = self.processor(images, do_rescale=False, do_normalize=False)["pixel_values"]
        if len({np.shape(image) for image in pixels}) != 1:
            raise _build_size_error()
        # In this memory order, too: a processor leaves colors last, and oneDNN's convolutions of such images write
        # beyond their end in the backward pass (torch 2.13; 5 of 3 x 224 x 224 into 6 channels).
        return np.array(pixels, np.uint8, order="C")

    def _require_equal_scaling(self, image: PIL.Image.Image, pixels: np.ndarray) -> None:
        processed = torch.from_numpy(np.asarray(self.processor([image], return_tensors="np")["pixel_values"])).float()
        if not torch.allclose(processed, self._scale_pixels(torch.from_numpy(pixels)), rtol=0, atol=1e-4):
            raise _build_processor_error(self.processor)

    def _scale_pixels(self, pixels: Tensor) -> Tensor:
        return (pixels.float() * self._scale - to_device(self._mean, pixels.device)) / to_device(
            self._std, pixels.device
        )

    def collate(self, examples: EncodedImages, indices: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        """Collate ``pixel_values``, (batch, 3, H, W), as the model's processor computes them, and ``labels``."""
        return self._scale_batch(self._load(examples, indices, device), examples, indices, device)

    def _load(self, examples: EncodedImages, indices: Sequence[int], device: torch.device) -> Tensor:
        """Return the bytes of some images on a device, (batch, 3, H, W)."""
        return to_device(torch.from_numpy(examples.pixels[list(indices)]), device)

    def _scale_batch(
        self, pixels: Tensor, examples: EncodedImages, indices: Sequence[int], device: torch.device
    ) -> dict[str, Tensor]:
        labels = torch.from_numpy(examples.labels[list(indices)])
        return {"pixel_values": self._scale_pixels(pixels), "labels": to_device(labels, device)}

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor], *, generate: bool = False) -> Tensor:
        """Compute the logits, (images, labels).

        Raises:
            FedspanError: If a training batch of one image is reduced so far that a norm has nothing to measure.
        """
        pixels = batch["pixel_values"]
        with _convert_size_error(batch) if model.training else nullcontext():
            return get_logits(model(pixel_values=pixels.to(getattr(model, "dtype", pixels.dtype))))

    def describe_examples(self, examples: EncodedImages) -> tuple[str, ...]:
        """Return no notes: no image is cut."""
        return ()


class AugmentedImageClassification(ImageClassification):
    """Image classification that trains on randomly changed images; evaluation sees the images as they are.

    The draw depends on seed, round, client, batch and image only.
    """

    def __init__(
        self, processor: Any, labels: Sequence[str], metric: str, advice: str = "", *, options: ImageOptions
    ) -> None:
        super().__init__(processor, labels, metric, advice)
        self.options = options

    def encode(self, dataset: datasets.Dataset) -> EncodedImages:
        """Encode as without changes."""
        examples = super().encode(dataset)
        shortest = min(examples.pixels.shape[2:])
        if self.options.crop_padding >= shortest:
            expected = f"fewer pixels than the images' shorter side, {shortest}"
            raise FedspanError("task_options.crop_padding", self.options.crop_padding, expected)
        return examples

    def collate_for_training(
        self, examples: EncodedImages, indices: Sequence[int], device: torch.device, keys: Sequence[Sequence[int | str]]
    ) -> dict[str, Tensor]:
        """Collate changed images, as ``collate`` does the images themselves.

        Args:
            keys: Key of each image's draw: the seed of the run, followed by round, client, phase and batch.
        """
        generators = create_example_generators("changed images", indices, keys)
        changed = augment(self._load(examples, indices, device), self.options, generators)
        return self._scale_batch(changed, examples, indices, device)


def _split(images: Iterable[PIL.Image.Image]) -> Generator[list[PIL.Image.Image]]:
    chunk, pixels = list["PIL.Image.Image"](), 0
    for image in images:
        size = image.width * image.height
        if chunk and (len(chunk) == _CHUNK or pixels + size > _CHUNK_PIXELS):
            yield chunk
            chunk, pixels = [], 0
        chunk.append(image)
        pixels += size
    if chunk:
        yield chunk


@contextmanager
def _convert_size_error(batch: Mapping[str, Tensor]) -> Generator[None]:
    try:
        yield
    except ValueError as error:
        size = int(batch["pixel_values"].shape[-1])
        raise FedspanError(
            "model.image_size", size, "larger images", problem=f"a batch of one image fails at this size ({error})"
        ) from error


def _build_size_error() -> FedspanError:
    return FedspanError("model.image_size", None, "a number of pixels", problem="the images differ in size")


def _build_processor_error(processor: object) -> FedspanError:
    expected = "a model whose image processor only resizes, rescales and normalizes"
    return FedspanError("model.name", type(processor).__name__, expected)


def _read(reader: ColumnReader, config: DataConfig) -> ReadColumns:
    label = config.label or "label"
    return ReadColumns({"image": reader.read_images(config.image)}, {config.image, label}, reader.read_classes(label))


def _build(processor: Any, settings: TaskSettings, data: DataConfig | None) -> ImageClassification:
    advice = "" if data is None else "To leave such rows out, set data.invalid: skip."
    options: ImageOptions = IMAGE_CLASSIFICATION.parse_options(settings.options)
    if options == ImageOptions():  # what needs the same inputs in every batch (DP-SGD, the frozen prefix) applies
        return ImageClassification(processor, settings.labels, settings.metric, advice)
    return AugmentedImageClassification(processor, settings.labels, settings.metric, advice, options=options)


IMAGE_CLASSIFICATION = TaskDefinition(
    name="image-classification",
    title="a label for an image",
    head="image-classification",
    build=_build,
    target_type="label",
    metrics=("accuracy", "macro_f1", "f1", "matthews", "loss"),
    columns=TaskColumns(
        read=_read,
        get_required_columns=lambda config, field: [(config.image,), (config.label or "label",)],
        get_example_column=lambda config: config.image,
        get_joined_columns=lambda config: (),
        find_valid_rows=lambda source, config, limit: find_readable_images(source, config.image, limit),
        required_values="a readable image or a label",
    ),
    default_model=("google/vit-base-patch16-224-in21k", "[q_proj, v_proj]"),
    lr=1e-3,
    summary_metrics=("macro_f1",),
    options=ImageOptions,
    loss_options=ImageClassification.loss_options,
    pipeline_tag="image-classification",
)
