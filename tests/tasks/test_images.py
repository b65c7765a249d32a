"""Image classification: what the model is shown, random changes of images, what is lost and measured."""

import io
from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
import pytest
import torch
import transformers
from PIL import Image, ImageEnhance, ImageOps
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

import fedspan
from fedspan.assembly.run import prepare
from fedspan.config import parse_config
from fedspan.core.tensors import create_generator
from fedspan.errors import FedspanError
from fedspan.models.loading import load_pretrained, load_scratch
from fedspan.tasks.images import EncodedImages, ImageClassification, ImageOptions, augment
from fedspan.tasks.single_label import SingleLabelClassification
from helpers import tiny_images
from helpers.fixed_logits import Fixed
from helpers.refusals import refused

CPU = torch.device("cpu")
LABELS = ("cat", "dog", "owl")
RNG = np.random.default_rng(0)


def noise(*shape: int) -> Image.Image:
    return Image.fromarray(RNG.integers(0, 256, shape, np.uint8))


def dataset(images: list[Image.Image], labels: list[int] | None = None) -> datasets.Dataset:
    made = datasets.Dataset.from_dict({"image": [None] * len(images), "label": labels or [0] * len(images)})
    rows = []
    for image in images:
        file = io.BytesIO()
        image.save(file, "PNG")
        rows.append({"bytes": file.getvalue(), "path": None})
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    return datasets.Dataset.from_dict({"image": rows, "label": made["label"]}, features=features)


def vit(**options: Any) -> Any:
    return transformers.ViTImageProcessorPil(**{"size": {"height": 6, "width": 10}, **options})


PROCESSORS = {
    "plain": vit(),
    "other colors": vit(image_mean=[0.1, 0.2, 0.3], image_std=[0.5, 0.25, 2.0]),
    "not normalized": vit(do_normalize=False),
    "not rescaled": vit(do_rescale=False, image_mean=[120.0, 110.0, 100.0], image_std=[60.0, 50.0, 70.0]),
    "neither": vit(do_rescale=False, do_normalize=False),
    "odd factor": vit(rescale_factor=1 / 127.5, do_normalize=False),
    "nearest": vit(resample=0),
    "cropped": transformers.BitImageProcessorPil(
        size={"shortest_edge": 8}, crop_size={"height": 6, "width": 7}, resample=3
    ),
    "convnext": transformers.ConvNextImageProcessorPil(size={"shortest_edge": 9}),
    "mobilevit": transformers.MobileViTImageProcessorPil(
        size={"shortest_edge": 9}, crop_size={"height": 8, "width": 8}
    ),
}


@pytest.mark.parametrize("kind", PROCESSORS)
def test_a_batch_is_what_the_processor_makes(kind: str) -> None:
    """Pixel for pixel, of images of several sizes, in any order, more than are decoded at once."""
    processor = PROCESSORS[kind]
    images = [noise(*shape, 3) for shape in ((9, 7), (30, 12), (6, 10), (11, 40))] * 70
    task = ImageClassification(processor, LABELS)
    encoded = task.encode(dataset(images, [row % 3 for row in range(280)]))
    assert encoded.pixels.dtype == np.uint8
    assert encoded.pixels.flags.c_contiguous
    assert encoded.lengths.tolist() == [1] * len(encoded) == [1] * 280
    chosen = [279, 0, 5, 3, 3, 258]
    batch = task.collate(encoded, chosen, CPU)
    expected = torch.from_numpy(np.stack(processor([images[row] for row in chosen])["pixel_values"])).float()
    assert batch["pixel_values"].shape == expected.shape
    assert batch["pixel_values"].is_contiguous()
    assert batch["pixel_values"].dtype == torch.float32
    assert float((batch["pixel_values"] - expected).abs().max()) < 2e-5
    assert batch["labels"].tolist() == [row % 3 for row in chosen]
    assert batch["labels"].dtype == torch.int64


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1", "CMYK"])
def test_everything_becomes_rgb(mode: str, tmp_path: Path) -> None:
    """As Pillow converts it; a transparent pixel keeps its color. ``tests/data/test_images.py`` has 16 bits."""
    image = noise(5, 9, 3).convert(mode)
    path = tmp_path / ("x.tiff" if mode == "CMYK" else "x.png")
    image.save(path)
    rows = datasets.Dataset.from_dict({"image": [str(path)], "label": [0]}).cast_column("image", datasets.Image())
    encoded = ImageClassification(vit(), LABELS).encode(rows)
    wanted = np.asarray(Image.open(path).convert("RGB").resize((10, 6), Image.Resampling.BILINEAR))
    assert np.array_equal(encoded.pixels[0].transpose(1, 2, 0), wanted)


def test_sizes_that_differ() -> None:
    """Within one part that is decoded at once, and between two of them."""
    task = ImageClassification(vit(do_resize=False), LABELS)
    same = [noise(4, 5, 3)] * 256
    for images in ([noise(4, 5, 3), noise(5, 4, 3)], [*same, noise(4, 6, 3)]):
        with refused("model.image_size") as caught:
            task.encode(dataset(images))
        assert (caught.value.field, caught.value.value) == ("model.image_size", None)
    assert task.encode(dataset(same[:3])).pixels.shape == (3, 3, 4, 5)


@pytest.mark.parametrize("content", ["cut", "text", "missing"])
def test_images_that_cannot_be_decoded(content: str, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.png", tmp_path / "bad.png"
    noise(20, 30, 3).save(good)
    if content != "missing":
        bad.write_bytes(good.read_bytes()[:300] if content == "cut" else b"no image")
    rows = datasets.Dataset.from_dict({"image": [str(good), str(bad)], "label": [0, 1]})
    task = ImageClassification(vit(), LABELS)
    with refused("data", "Pillow cannot decode") as caught:
        task.encode(rows.cast_column("image", datasets.Image()))
    assert (caught.value.field, caught.value.value) == ("data", str(bad))
    stored = [{"bytes": good.read_bytes(), "path": None}, {"bytes": b"no image", "path": None}]
    with pytest.raises(FedspanError) as caught:
        task.encode(datasets.Dataset.from_dict({"image": stored, "label": [0, 1]}))
    assert caught.value.value == "image 2"


def test_the_error_of_a_run_names_the_option_for_damaged_images(tmp_path: Path) -> None:
    tiny_images.save_model("vit", tmp_path)
    pictures = tiny_images.save_pictures(tmp_path)
    (pictures / "east" / "red" / "02.png").write_bytes(b"no image")
    with refused("data", r"02\.png .*To leave such rows out, set data\.invalid: skip"):
        prepare(tiny_images.config(tmp_path))
    prepared = prepare(tiny_images.config(tmp_path, data={"invalid": "skip"}))
    assert len(prepared.train) + len(prepared.test) == sum(tiny_images.SITES.values()) - 1


def test_loss_metrics_and_answers() -> None:
    """Labels 0 1 1 2, predicted 0 1 0 0; the model is shown its own number format."""
    task = ImageClassification(vit(), LABELS, "macro_f1")
    assert isinstance(task, SingleLabelClassification)
    encoded = task.encode(dataset([noise(4, 5, 3)] * 5, [2, 2, 0, 1, 1]))
    logits = torch.tensor([[4.0, 1, 0], [0, 5, 0], [2, 1, 0], [3, 0, 1]])
    model = Fixed(logits, torch.bfloat16)
    loss = task.compute_loss(model, task.collate(encoded, [2, 3, 4, 0], CPU))
    truth = torch.tensor([0, 1, 1, 2])
    assert float(loss) == pytest.approx(float(F.cross_entropy(logits, truth)), rel=1e-6)
    assert model.asked["pixel_values"].dtype == torch.bfloat16
    found = task.compute_metrics(logits, encoded, [2, 3, 4, 0])
    assert found["accuracy"] == 0.5
    assert found["macro_f1"] == pytest.approx((1 / 2 + 2 / 3 + 0) / 3)
    assert found["loss"] == pytest.approx(float(loss), rel=1e-6)
    assert task.decode_predictions(logits) == ["cat", "dog", "cat", "cat"]
    assert task.decode_targets(encoded, [0, 3]) == ["owl", "dog"]
    assert (task.metric, task.describe_examples(encoded)) == ("macro_f1", ())


def test_image_size_replaces_the_processor_s_own(images: Path, tmp_path: Path) -> None:
    """Rows and columns, without a crop; also of ConvNeXt's processor, which published ResNets have."""
    shown = noise(9, 31, 3)
    for number, own in enumerate((PROCESSORS["cropped"], PROCESSORS["convnext"], PROCESSORS["other colors"])):
        folder = tmp_path / str(number)
        transformers.ResNetForImageClassification.from_pretrained(images / "resnet").save_pretrained(folder)
        own.save_pretrained(folder)
        processor = load_pretrained(str(folder), "image-classification", LABELS, image_size=12).processor
        task = ImageClassification(processor, LABELS)
        encoded = task.encode(dataset([shown]))
        wanted = np.asarray(shown.resize((12, 12), Image.Resampling(int(own.resample))))
        assert np.array_equal(encoded.pixels[0].transpose(1, 2, 0), wanted)
        assert (processor.image_mean, processor.image_std) == (own.image_mean, own.image_std)


def test_from_scratch_images_become_numbers_from_minus_one_to_one(images: Path) -> None:
    for name, size, expected in (("builtin:resnet-8", 9, (9, 9)), (str(images / "vit"), None, (8, 12))):
        loaded = load_scratch(name, "image-classification", LABELS, image_size=size)
        task = ImageClassification(loaded.processor, LABELS)
        black_and_white = [Image.new("RGB", (20, 30), color) for color in ("black", "white")]
        batch = task.collate(task.encode(dataset(black_and_white)), [0, 1], CPU)["pixel_values"]
        assert batch.shape == (2, 3, *expected)
        assert torch.equal(batch[0], torch.full_like(batch[0], -1))
        assert torch.allclose(batch[1], torch.ones_like(batch[1]))
        assert task.predict(loaded.model, {"pixel_values": batch}).shape == (2, 3)


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


def test_without_options_an_image_stays_with_them_every_shift_occurs() -> None:
    assert torch.equal(augment(image(1)[None], ImageOptions(), [torch.Generator()])[0], image(1).float())
    # In both directions, by the whole padding, with black beside the image
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
    with refused("task_options.crop_padding", "fewer pixels than the images' shorter side, 8"):
        prepare(parse_config({**values, "task_options": {"crop_padding": 8}}))
