"""Random changes of training images: Pillow's own, drawn by keys, the same on both engines, and never in evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from safetensors.torch import load_file
from torch import Tensor

import fedspan
from fedspan.config import parse_config
from fedspan.core.tensors import create_generator
from fedspan.errors import FedspanError
from fedspan.runs.setup import prepare
from fedspan.tasks.augmentation import ImageOptions, augment
from fedspan.tasks.images import AugmentedImageClassification, EncodedImages, ImageClassification
from helpers import tiny_images

CPU = torch.device("cpu")
OPTIONS = {"crop_padding": 2, "flip": 0.5, "brightness": 0.5, "contrast": 0.4}


def image(seed: int) -> Tensor:
    return torch.randint(256, (3, 6, 9), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def change_with_pillow(pixels: Tensor, options: ImageOptions, generator: torch.Generator) -> np.ndarray:
    """The same draws in Pillow's operations, which round to bytes after each step."""
    picture, padding = Image.fromarray(pixels.permute(1, 2, 0).numpy()), options.crop_padding
    top, left = torch.randint(2 * padding + 1, (2,), generator=generator).tolist()
    flip, brightness, contrast = torch.rand(3, generator=generator).tolist()
    width, height = picture.size
    picture = ImageOps.expand(picture, padding, 0).crop((left, top, left + width, top + height))
    picture = ImageOps.mirror(picture) if flip < options.flip else picture
    picture = ImageEnhance.Brightness(picture).enhance(1 + options.brightness * (2 * brightness - 1))
    picture = ImageEnhance.Contrast(picture).enhance(1 + options.contrast * (2 * contrast - 1))
    return np.asarray(picture, np.float32).transpose(2, 0, 1)


@pytest.mark.parametrize(
    "options", [{name: value} for name, value in OPTIONS.items()] + [OPTIONS, {**OPTIONS, "flip": 1.0}], ids=str
)
def test_changes_are_those_of_pillow(options: dict[str, Any]) -> None:
    made = ImageOptions(**options)
    changed = 0
    for seed in range(25):
        generators = [torch.Generator().manual_seed(seed + other) for other in (100, 0)]
        result = augment(torch.stack([image(99), image(seed)]), made, generators)[1]
        expected = change_with_pillow(image(seed), made, torch.Generator().manual_seed(seed))
        assert result.dtype == torch.float32
        assert result.shape == expected.shape
        # Pillow truncates: the brightness by 1, times a contrast of 1.4; gray by 1.5, times 0.4; the result by 1.
        assert float(np.abs(result.numpy() - expected).max()) < 3.0
        changed += not torch.equal(result, image(seed).float())
    assert changed > 8


def test_without_options_an_image_stays() -> None:
    assert torch.equal(augment(image(1)[None], ImageOptions(), [torch.Generator()])[0], image(1).float())


def test_every_shift_occurs_and_flips_are_as_frequent_as_asked() -> None:
    """In both directions, by the whole padding, with black beside the image."""
    generator, white = torch.Generator().manual_seed(0), torch.full((200, 3, 6, 9), 255, dtype=torch.uint8)
    shifted = augment(white, ImageOptions(crop_padding=2), [generator] * 200)
    black = {tuple((one == 0).sum((0, 1)).tolist()) for one in shifted}
    assert len(black) == 5 * 3  # five shifts of the columns; rows count by their number only
    pixels = image(2)
    changed = augment(pixels.expand(400, -1, -1, -1), ImageOptions(flip=0.3), [generator] * 400)
    assert 80 < sum(torch.equal(one, pixels.float().flip(2)) for one in changed) < 160


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {**tiny_images.settings(folder, "vit", **changes), "task_options": OPTIONS}


def test_draws_depend_on_the_key_and_evaluation_draws_nothing(images: Path) -> None:
    run = prepare(parse_config(settings(images)))
    task, examples = run.task, cast(EncodedImages, run.train)
    assert isinstance(task, AugmentedImageClassification)
    keys = [(0, 1, "east", "a", 0)] * 3
    batch = task.collate_for_training(examples, [4, 5, 4], CPU, keys)["pixel_values"]
    assert torch.equal(batch[0], batch[2])
    assert torch.equal(task.collate_for_training(examples, [5], CPU, keys[:1])["pixel_values"][0], batch[1])
    for key in ((1, 1, "east", "a", 0), (0, 2, "east", "a", 0), (0, 1, "west", "a", 0), (0, 1, "east", "a", 1)):
        other = task.collate_for_training(examples, [4], CPU, [key])
        assert not torch.equal(other["pixel_values"][0], batch[0])
        assert other["labels"].tolist() == examples.labels[[4]].tolist()
    plain = ImageClassification(task.processor, task.labels)
    expected = plain.collate(examples, [4, 5], CPU)["pixel_values"]
    assert torch.equal(task.collate(examples, [4, 5], CPU)["pixel_values"], expected)
    generators = [create_generator(0, "changed images", *keys[0][1:], 4)]
    changed = augment(torch.from_numpy(examples.pixels[[4]]), task.options, generators)[0]
    assert torch.allclose(
        batch[0],
        (changed / 255 - torch.tensor([0.4, 0.5, 0.6]).reshape(3, 1, 1))
        / torch.tensor([0.2, 0.3, 0.25]).reshape(3, 1, 1),
        atol=1e-5,
    )


def test_engines_agree_and_the_changes_matter(images: Path, tmp_path: Path) -> None:
    engines = {"loop": {"name": "loop"}, "batched": {"name": "batched", "clients_per_pass": 3}}
    adapters: dict[str, dict[str, Tensor]] = {}
    for name, engine in engines.items():
        fedspan.run({**settings(images), "engine": engine}, tmp_path / name)
        adapters[name] = load_file(tmp_path / name / "adapter" / "adapter_model.safetensors")
    fedspan.run({**settings(images), "task_options": {}, "engine": engines["loop"]}, tmp_path / "plain")
    plain = load_file(tmp_path / "plain" / "adapter" / "adapter_model.safetensors")
    for name, value in adapters["loop"].items():
        assert torch.allclose(adapters["batched"][name], value, rtol=1e-4, atol=1e-5), name
    assert any(not torch.allclose(plain[name], value, rtol=1e-2) for name, value in adapters["loop"].items())
    assert fedspan.read_notes(tmp_path / "loop" / "adapter")["options"] == OPTIONS
    picture = next((images / "pictures").rglob("*.png"))
    assert len(fedspan.predict(tmp_path / "loop", [str(picture)])) == 1


@pytest.mark.parametrize(
    "options", [{"flip": 1.5}, {"crop_padding": -1}, {"contrast": "high"}, {"rotation": 3}], ids=str
)
def test_options_are_checked(images: Path, options: dict[str, Any]) -> None:
    with pytest.raises(FedspanError, match=f"task_options.{next(iter(options))}"):
        parse_config({**settings(images), "task_options": options})


def test_images_are_not_shifted_beyond_their_side(images: Path) -> None:
    values = settings(images)
    with pytest.raises(FedspanError, match="fewer pixels than the images' shorter side, 8") as caught:
        prepare(parse_config({**values, "task_options": {"crop_padding": 8}}))
    assert caught.value.field == "task_options.crop_padding"
