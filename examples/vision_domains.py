"""Three data owners with pictures, each with a style of its own, train one image classifier from scratch.

    python examples/vision_domains.py
    python examples/vision_domains.py --pictures FOLDER          # your own: FOLDER/domain/class/picture.png

The script draws its pictures itself: five shapes, with ink on paper, with chalk on slate, and in colors. Each style is
one client, and they hold 300, 200 and 125 pictures. What it shows: folders of images as data, a division by a column,
a model without pretrained weights, and two methods side by side: FedAvg sends whole weights, FedHM factors of them.
The accuracy of each domain tells whom the common model serves worst. Times: examples/README.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table

import fedspan

SIZE = 24
SHAPES = ("circle", "cross", "ring", "square", "triangle")
HELD = {"ink": 60, "chalk": 40, "colors": 25}
"""Pictures of each shape, by domain."""
METHODS: dict[str, dict[str, Any]] = {"fedavg": {}, "fedhm": {"r": 8}}


def draw(shape: str, domain: str, rng: np.random.Generator) -> Image.Image:
    """Draw a shape at a random place, in a domain's style."""
    dark, light = (int(level) for level in (rng.integers(0, 60), rng.integers(190, 256)))
    if domain == "colors":
        back, front = (tuple(int(level) for level in rng.integers(low, low + 110, 3)) for low in (0, 140))
    else:
        levels = (light, dark) if domain == "ink" else (dark, light)
        back, front = ((level, level, level) for level in levels)
    picture = Image.new("RGB", (SIZE, SIZE), back)
    pen = ImageDraw.Draw(picture)
    radius = int(rng.integers(6, 10))
    x, y = (int(place) for place in rng.integers(radius + 1, SIZE - radius - 1, 2))
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        pen.ellipse(box, fill=front)
    elif shape == "ring":
        pen.ellipse(box, outline=front, width=2)
    elif shape == "square":
        pen.rectangle(box, fill=front)
    elif shape == "triangle":
        pen.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=front)
    else:
        pen.line((x - radius, y, x + radius, y), fill=front, width=3)
        pen.line((x, y - radius, x, y + radius), fill=front, width=3)
    noise = rng.normal(0, 25 if domain == "chalk" else 8, (SIZE, SIZE, 1))
    return Image.fromarray((np.asarray(picture) + noise).clip(0, 255).astype(np.uint8))


def draw_all(folder: Path, share: float) -> None:
    """Write a folder of pictures as fedspan reads them: domain/class/picture."""
    rng = np.random.default_rng(0)
    for domain, count in HELD.items():
        for shape in SHAPES:
            place = folder / domain / shape
            place.mkdir(parents=True, exist_ok=True)
            for number in range(round(share * count)):
                draw(shape, domain, rng).save(place / f"{number:03}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=Path, help="folder with domain/class/picture")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="left out: runs/vision_domains, or runs/vision_domains-smoke")
    parser.add_argument("--smoke", action="store_true", help="a few seconds: one round on 125 pictures")
    args = parser.parse_args()
    args.out = args.out or Path("runs/vision_domains-smoke" if args.smoke else "runs/vision_domains")

    pictures = args.pictures
    if pictures is None:
        pictures = args.out / "pictures"
        draw_all(pictures, share=0.2 if args.smoke else 1.0)
    config: dict[str, Any] = {
        "task": "image-classification",
        # Drawn from the seed, so all of it trains: these layers by the method, norms and classifier beside them.
        "model": {"name": "builtin:resnet-8", "target_modules": ["conv1", "conv2"], "image_size": SIZE},
        "data": {"train": str(pictures), "test_fraction": 0},
        # Every client is measured on its own test part, so that is where the pictures go.
        "partition": {"partitioner": "natural", "column": "domain", "validation": 0.1, "test": 0.25},
        "federation": {"rounds": 1 if args.smoke else args.rounds},
        "training": {"lr": 5e-3, "batch_size": 16},
    }
    reports = {
        name: fedspan.run({**config, "method": {"name": name, **options}}, args.out / name, resume=True)
        for name, options in METHODS.items()
    }

    domains = list(next(iter(reports.values())).by_client)
    table = Table(
        "method", *domains, "mean", "worst domain", "MB up", title="accuracy on each domain's own test part, %"
    )
    for name, report in reports.items():
        own, scores = report.by_client, report.scores["clients"]
        table.add_row(
            name,
            *(f"{100 * own[domain]['accuracy']:.1f}" for domain in domains),
            f"{100 * scores['accuracy']:.1f}",
            scores["worst"]["client"],
            f"{report.bytes['up'] / 1e6:.2f}",
        )
    Console().print(table)

    one = next(pictures.rglob("*.png"))
    label, probability = fedspan.predict(args.out / "fedavg", [one])[0]
    print(f"{one.relative_to(pictures)}: {label} ({probability:.2f})")
    print(f"model: {args.out / 'fedavg' / reports['fedavg'].adapters['global']}")


if __name__ == "__main__":
    main()
