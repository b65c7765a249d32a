"""The subsets of data and the configs of the tables of defaults: what ``fedspan init`` writes, untouched.

For every data set and seed, a subset is written as a user would have it (a csv file, or a folder of images by class).
It is drawn by its seed; train and test rows come from the set's own train and test parts.
"""

import argparse
import csv
import gzip
import io
import random
import struct
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PARTITIONS = {"IID": (), "Dirichlet 0.3": ("partition.partitioner=dirichlet", "partition.alpha=0.3")}
WORDS = 40
"""Length of the longest product reviews that are used: training on long texts takes long."""
_PAIR = ("sentence1", "sentence2", "label")
DOMAINS = ("airline", "books", "dvd", "electronics", "kitchen")

Rows = list[tuple[str, ...]]
Images = list[tuple[str, bytes]]


@dataclass(frozen=True)
class TextSet:
    """A data set of texts.

    Args:
        columns: Column names of the csv files.
        read: Reads the part ``train`` or ``test`` from the folder of all data sets.
        train: Number of training rows; None: all.
        test: Number of test rows, at most.
        split: Whether the set has a test part of its own; False: ``read`` returns all rows, which are then split.
    """

    columns: tuple[str, ...]
    read: Callable[[Path, str], Rows]
    train: int | None = 800
    test: int = 400
    split: bool = True


@dataclass(frozen=True)
class ImageSet:
    """A data set of images; arguments as for ``TextSet``, and the settings that its files need.

    Args:
        read: Reads ``(class, file content)`` of a part.
        train: Number of training images.
        test: Number of test images, at most.
        split: As for ``TextSet``.
        size: Number of rows and columns that images are resized to.
    """

    read: Callable[[Path, str], Images]
    train: int = 400
    test: int = 300
    split: bool = True
    size: int = 64


def tsv(path: Path) -> list[list[str]]:
    """The rows of a file with tabs, without its header."""
    return [line.rstrip("\n").split("\t") for line in path.read_text(encoding="utf-8").splitlines()][1:]


def banking77(labels: int | None) -> Callable[[Path, str], Rows]:
    """Banking77 with its first labels by name, or all."""

    def read(data: Path, part: str) -> Rows:
        with (data / "banking77" / f"{part}.csv").open(newline="", encoding="utf-8") as file:
            rows = [(row["text"], row["category"]) for row in csv.DictReader(file)]
        first = set(sorted({label for _, label in rows})[:labels])
        return [row for row in rows if row[1] in first]

    return read


def sst2(data: Path, part: str) -> Rows:
    """SST-2; its development set is the test part, as the labels of the test set are secret."""
    names = ("negative", "positive")
    rows = tsv(data / "glue" / "SST-2" / f"{'train' if part == 'train' else 'dev'}.tsv")
    return [(text.strip(), names[int(label)]) for text, label in rows]


def glue_pairs(name: str, columns: Sequence[int], *files: str) -> Callable[[Path, str], Rows]:
    """Pairs of texts of GLUE, with the numbers of their columns; the test part is at most 400 rows of the last file."""

    def read(data: Path, part: str) -> Rows:
        rows = tsv(data / "glue" / name / files[0 if part == "train" else -1])
        held = set(random.Random(0).sample(range(len(rows)), min(400, len(rows))))
        if part == "test" or len(files) == 1:
            rows = [row for number, row in enumerate(rows) if (number in held) == (part == "test")]
        classes = {"0": "different", "1": "equivalent"}
        return [tuple(classes.get(row[column], row[column]) for column in columns) for row in rows]

    return read


def reviews(data: Path, part: str) -> Iterator[tuple[str, str, str]]:
    """Text, sentiment and domain of the product reviews of at most ``WORDS`` words."""
    for domain in DOMAINS:
        name = "train" if part == "train" else "dev"
        with (data / "blitzer_sentiment" / domain / f"{name}.tsv").open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file, delimiter="\t"):
                if len(row["sentence"].split()) <= WORDS:
                    yield row["sentence"], row["label"], domain


def sentiments(data: Path, part: str) -> Rows:
    """Product reviews with their sentiment."""
    return [(text, sentiment) for text, sentiment, _ in reviews(data, part)]


def domains(data: Path, part: str) -> Rows:
    """Product reviews with their domain."""
    return [(text, domain) for text, _, domain in reviews(data, part)]


def fashion_mnist(data: Path, part: str) -> Images:
    """Fashion-MNIST as PNG files."""
    from PIL import Image

    stem, names = (
        "train" if part == "train" else "t10k",
        "top trouser pullover dress coat sandal shirt sneaker bag boot",
    )
    folder = data / "fashion-mnist"
    with gzip.open(folder / f"{stem}-images-idx3-ubyte.gz") as file:
        count, rows, columns = struct.unpack(">4xIII", file.read(16))
        pixels = file.read()
    with gzip.open(folder / f"{stem}-labels-idx1-ubyte.gz") as file:
        labels = file.read()[8:]
    images: Images = []
    for index in range(min(count, 12_000)):  # enough to draw a subset from
        content = io.BytesIO()
        Image.frombytes("L", (columns, rows), pixels[index * rows * columns : (index + 1) * rows * columns]).save(
            content, "PNG"
        )
        images.append((names.split()[labels[index]], content.getvalue()))
    return images


def pacs(data: Path, part: str) -> Images:
    """PACS: photographs, paintings, cartoons and sketches."""
    images: Images = []
    for path in sorted((data / "pacs").glob("*.tar")):
        with tarfile.open(path) as tar:
            for client_data in tar.getmembers():
                file = tar.extractfile(client_data)
                if file is not None:
                    images.append((client_data.name.split("/")[-2], file.read()))
    return images


SETS: dict[str, TextSet | ImageSet] = {
    "Banking77": TextSet(("text", "category"), banking77(None), train=1200, test=1000),
    "Banking77, 20 classes": TextSet(("text", "category"), banking77(20), train=None, test=800),
    "SST-2": TextSet(("sentence", "label"), sst2),
    "reviews, sentiment": TextSet(("review", "sentiment"), sentiments, train=400),
    "reviews, domain": TextSet(("review", "topic"), domains, train=None),
    "MRPC": TextSet(_PAIR, glue_pairs("MRPC", (3, 4, 0), "train.tsv", "msr_paraphrase_test.txt")),
    "QNLI": TextSet(_PAIR, glue_pairs("QNLI", (1, 2, 3), "dev.tsv")),
    "PACS": ImageSet(pacs, split=False),
    "Fashion-MNIST": ImageSet(fashion_mnist),
}


@dataclass(frozen=True)
class Cell:
    """One run.

    Args:
        name: Name of the data set.
        partition: Name of the partition.
        seed: Seed of subset and run.
    """

    name: str
    partition: str
    seed: int

    @property
    def stem(self) -> str:
        """Name of the cell's files."""
        parts = (self.name, self.partition, f"seed {self.seed}")
        return "-".join("".join(c if c.isalnum() else "_" for c in part).lower() for part in parts)


def write_rows(path: Path, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Write a csv file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([columns, *rows])


def draw(kind: TextSet | ImageSet, data: Path, rng: random.Random) -> tuple[list[Any], list[Any]]:
    """Draw the training and the test examples of a subset."""
    if kind.split:
        parts = kind.read(data, "train"), kind.read(data, "test")
        sizes = min(kind.train or len(parts[0]), len(parts[0])), min(kind.test, len(parts[1]))
        return rng.sample(parts[0], sizes[0]), rng.sample(parts[1], sizes[1])
    drawn = rng.sample(kind.read(data, "all"), kind.train + kind.test)
    return drawn[: kind.train], drawn[kind.train :]


def write_data(cell: Cell, args: argparse.Namespace) -> tuple[Path, Path]:
    """Write a cell's subset; return the paths of its train and test parts."""
    kind = SETS[cell.name]
    folder = args.out / "data" / f"{''.join(c if c.isalnum() else '_' for c in cell.name).lower()}-{cell.seed}"
    ending = ".csv" if isinstance(kind, TextSet) else ""
    paths, marker = (folder / f"train{ending}", folder / f"test{ending}"), folder / "done"
    if marker.exists():
        return paths
    folder.mkdir(parents=True, exist_ok=True)
    drawn = draw(kind, args.data, random.Random(f"{cell.name} {cell.seed}"))
    for path, examples in zip(paths, drawn, strict=True):
        if isinstance(kind, TextSet):
            write_rows(path, kind.columns, examples)
            continue
        for number, (label, content) in enumerate(examples):
            (path / label).mkdir(parents=True, exist_ok=True)
            (path / label / f"{number:05}.{'png' if content[1:4] == b'PNG' else 'jpg'}").write_bytes(content)
    marker.touch()
    return paths


def config_of(cell: Cell, args: argparse.Namespace) -> Any:
    """Let init write the cell's config, and set what belongs to the experiment."""
    from fedspan.config import load_config
    from fedspan.config.starter import write_starter_config

    kind = SETS[cell.name]
    train, test = write_data(cell, args)
    path = args.out / "configs" / f"{cell.stem}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    model = None if isinstance(kind, TextSet) else str(args.models / "mobilenet_v2")
    write_starter_config(train, path, test=test, force=True, model=model)
    changes = [f"seed={cell.seed}", "threads=1", *PARTITIONS[cell.partition]]
    if isinstance(kind, ImageSet):
        changes.append(f"model.image_size={kind.size}")
    return load_config(path, changes)
