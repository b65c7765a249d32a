"""Mistakes with images, with convolutions and embeddings as targets, and with models from scratch."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

import fedspan
from fedspan.assembly.run import prepare
from fedspan.config import parse_config

from .. import tiny_images
from ..mistakes.world import Mistake, World, cut, edit_json

TASK = "image-classification"


def _folder(*names: str) -> Callable[[World], object]:
    def provoke(world: World) -> None:
        for name in names:
            path = world.folder / "images" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (6, 4)).save(path)
        world.load(train="images", task=TASK)

    return provoke


def _prepare(kind: str = "vit", **changes: Any) -> Callable[[World], object]:
    return lambda world: prepare(tiny_images.config(world.images, kind, **changes))


def _model(kind: str, **model: Any) -> Callable[[World], object]:
    return _prepare(kind, model=model)


def _decoder(target: str) -> Callable[[World], object]:
    return lambda world: world.decoder("opt", model={"target_modules": [target]})


def _damaged(world: World) -> None:
    folder = Path(shutil.copytree(world.images / "pictures", world.folder / "pictures"))
    cut(folder / "east" / "red" / "02.png")
    prepare(tiny_images.config(world.images, data={"train": "pictures"}))


def _sizes(world: World) -> None:
    folder = Path(shutil.copytree(world.images / "vit", world.folder / "model"))
    edit_json(folder / "preprocessor_config.json", do_resize=False)
    prepare(tiny_images.config(world.images, model={"name": "model"}))


def _processor(world: World) -> None:
    folder = Path(shutil.copytree(world.images / "vit", world.folder / "model"))
    content = {"image_processor_type": "EfficientNetImageProcessor", "include_top": True}
    edit_json(folder / "preprocessor_config.json", **content)
    prepare(tiny_images.config(world.images, model={"name": "model"}))


def _no_processor(world: World) -> None:
    folder = Path(shutil.copytree(world.images / "vit", world.folder / "model"))
    (folder / "preprocessor_config.json").unlink()
    prepare(tiny_images.config(world.images, model={"name": "model"}))


def _narrow(world: World) -> None:
    made = prepare(tiny_images.config(world.images, "resnet", model={"image_size": 8}, training={"batch_size": 1}))
    made.federation.run_round(made.federation.begin())


def _predict(*given: Any) -> Callable[[World], object]:
    return lambda world: fedspan.predict(world.run("seeing"), given)


def _notes(world: World) -> None:
    folder = fedspan.export(world.run("seeing"), world.folder / "adapter")
    edit_json(folder / "fedspan.json", image_size=-3)
    fedspan.predict(folder, ["x.png"])


def _texts(world: World) -> None:
    world.load(train=str(world.images / "pictures"))


def _parse(**values: Any) -> Callable[[World], object]:
    return lambda world: parse_config({"data": {"train": "train.csv"}, **values})


IMAGES = [
    Mistake("Images that are not in folders of classes.", "data.train", _folder("1.png", "2.png")),
    Mistake("A single folder of images.", "data.label", _folder("cat/1.png", "cat/2.png")),
    Mistake("Images for a text task.", "data.text", _texts),
    Mistake("An image is truncated.", "data", _damaged, "Pillow cannot decode "),
    Mistake("Images of different sizes that the processor does not resize.", "model.image_size", _sizes),
    Mistake(
        "An image size that the ViT does not accept.", "model.image_size", _model("vit", image_size=16), "pixels: "
    ),
    Mistake("A batch of one image that shrinks to one pixel.", "model.image_size", _narrow, "(Expected "),
    Mistake("An image processor that does more than resize and normalize.", "model.name", _processor),
    Mistake("A model without an image processor.", "model.name", _no_processor, "cannot be loaded ("),
    Mistake(
        "An image architecture for a text task.",
        "model.name",
        lambda world: world.prepare(model={"name": "builtin:resnet-8"}),
    ),
    Mistake("An unknown architecture.", "model.name", _model("builtin:resnet-8", name="builtin:resnet-50")),
    Mistake(
        "A target embedding that shares its weight with the head.", "model.target_modules", _decoder("embed_tokens")
    ),
    Mistake(
        "A normalization layer as a target.",
        "model.target_modules",
        _model("resnet", target_modules=["normalization"], modules_to_save=[]),
    ),
    Mistake("`fedspan predict` on a file that does not exist.", "data", _predict("no.png"), "Pillow cannot decode "),
    Mistake("A pair of texts for an image model.", "texts", _predict("no.png", ("one", "two"))),
    Mistake("fedspan.json's image_size is negative.", "FOLDER/adapter/fedspan.json.image_size", _notes),
]
