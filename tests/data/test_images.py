"""Images as they are published: every layout and error, the data sets of the catalogue, and bombs."""

import gzip
import io
import json
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from fedspan.config import parse_config
from fedspan.data import DataConfig
from fedspan.data.files import read_source
from fedspan.data.images import MAX_PIXELS, decode_image, find_readable_images
from fedspan.data.loading import LoadedData, load
from fedspan.tasks import images as tasks
from fedspan.tasks.registry import get_task
from helpers.families import others_slow
from helpers.refusals import Refused

RNG = np.random.default_rng(0)
CIFAR_NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def pixels(count: int, *shape: int) -> np.ndarray:
    return RNG.integers(0, 256, (count, *shape), np.uint8)


def idx(values: np.ndarray, kind: int = 8) -> bytes:
    return struct.pack(f">BBBB{values.ndim}I", 0, 0, kind, values.ndim, *values.shape) + values.tobytes()


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def save_idx(path: Path, images: np.ndarray, labels: np.ndarray) -> Path:
    write(path, idx(images))
    write(path.with_name(path.name.replace("images", "labels").replace("idx3", "idx1")), idx(labels))
    return path


def save_png(path: Path, image: np.ndarray | Image.Image) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    made = image if isinstance(image, Image.Image) else Image.fromarray(image)
    made.save(path)
    return path


def png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def read(train: Path | str, **options: Any) -> LoadedData:
    given = {"test_fraction": 0, **options, "train": str(train)}
    return load(DataConfig.model_validate(given), task=get_task("image-classification").columns)


def decoded(data: datasets.Dataset) -> list[np.ndarray]:
    """What is in the column of images, as it is stored (gray stays gray)."""
    return [np.asarray(image) for image in data["image"]]


def same(found: list[np.ndarray], wanted: np.ndarray | list[np.ndarray]) -> bool:
    return len(found) == len(wanted) and all(
        np.array_equal(one, other) for one, other in zip(found, wanted, strict=True)
    )


def refuse(path: Path, words: list[str], refused: Refused, **options: Any) -> None:
    refused("data.train", str(path), words, lambda: read(path, **options))


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte.gz", "train-images-idx3-ubyte", "t10k-images.idx3-ubyte"])
def test_idx_files(name: str, tmp_path: Path) -> None:
    """Higher than wide, packed or plain, with either of the two spellings; the labels are found beside them."""
    images, labels = pixels(5, 7, 4), np.array([3, 0, 11, 3, 2], np.uint8)
    data = read(save_idx(tmp_path / name, images, labels))
    assert same(decoded(data.train), images)
    assert data.labels == ("0", "2", "3", "11")
    assert data.train["label"] == [2, 0, 3, 2, 1]
    assert data.train.column_names == ["image", "label"]
    assert data.test is None


def test_damaged_idx_files(tmp_path: Path, refused: Refused) -> None:
    images, labels = pixels(3, 4, 5), np.arange(3, dtype=np.uint8)
    path = save_idx(tmp_path / "a-images-idx3-ubyte", images, labels)
    beside = path.with_name("a-labels-idx1-ubyte")
    whole = path.read_bytes()
    cases = [
        (whole[:-1], ["declares 60 bytes and holds 59"]),
        (whole + b"x", ["declares 60 bytes and holds more"]),
        (whole[:9], ["is not an idx file of unsigned bytes in 3 dimensions"]),
        (idx(images.astype(">f4"), 13), ["is not an idx file of unsigned bytes"]),
        (idx(images.reshape(3, 20)), ["in 3 dimensions"]),
        (b"", ["in 3 dimensions"]),
        (
            whole[:4] + np.array([1, 1 << 16, (1 << 15) + 1], ">u4").tobytes(),
            ["declares 2147549184 bytes, more than 2 GiB"],
        ),
        (idx(images[:2]), ["it holds 2 images, a-labels-idx1-ubyte 3 labels"]),
        (whole, ["its labels are missing: a-labels-idx1-ubyte"]),
    ]
    for content, words in cases:
        path.write_bytes(content)
        if "missing" in words[0]:
            beside.unlink()
        refuse(path, ["cannot be read as images", *words], refused)
    packed = tmp_path / "b-images-idx3-ubyte.gz"
    content = bytearray(gzip.compress(whole))
    write(tmp_path / "b-labels-idx1-ubyte.gz", idx(labels))
    for damaged in (
        content[:-20],
        b"plain",
        bytes([*content[:12], *(255 - byte for byte in content[12:40]), *content[40:]]),
    ):
        packed.write_bytes(damaged)
        refuse(packed, ["cannot be read as images"], refused)
    empty = save_idx(tmp_path / "c-images-idx3-ubyte", pixels(0, 4, 5), labels[:0])
    refuse(empty, ["holds no examples"], refused)


def cifar(count: int, labels: int, classes: int) -> tuple[bytes, np.ndarray, np.ndarray]:
    """Records, their images (rows, columns, colors) and their last label."""
    images, given = pixels(count, 32, 32, 3), RNG.integers(0, classes, (count, labels), np.uint8)
    records = [given[row].tobytes() + images[row].transpose(2, 0, 1).tobytes() for row in range(count)]
    return b"".join(records), images, given


def test_cifar_10(tmp_path: Path) -> None:
    """The folder is the five batches in order, without the test batch; classes have the names beside them."""
    folder = tmp_path / "cifar-10-batches-bin"
    parts = [cifar(3, 1, 10) for _ in range(5)]
    for number, (content, _, _) in enumerate(parts, start=1):
        write(folder / f"data_batch_{number}.bin", content)
    content, test_images, test_labels = cifar(2, 1, 10)
    write(folder / "test_batch.bin", content)
    write(folder / "batches.meta.txt", "\n".join([*CIFAR_NAMES, ""]).encode())
    data = read(folder, test=str(folder / "test_batch.bin"), labels=CIFAR_NAMES)
    assert same(decoded(data.train), np.concatenate([images for _, images, _ in parts]))
    assert data.train["label"] == np.concatenate([labels[:, 0] for _, _, labels in parts]).tolist()
    assert same(decoded(data.test), test_images)
    assert data.test["label"] == test_labels[:, 0].tolist()
    (folder / "batches.meta.txt").unlink()
    assert set(read(folder).labels) <= {str(number) for number in range(10)}


def test_cifar_100(tmp_path: Path, refused: Refused) -> None:
    """Two labels a record: the fine one is the label, the coarse one a column of its own."""
    content, images, labels = cifar(6, 2, 4)
    path = write(tmp_path / "train.bin", content)
    write(tmp_path / "coarse_label_names.txt", b"fish\nflowers\npeople\ntrees\n")
    write(tmp_path / "fine_label_names.txt", b"cod\nrose\nbaby\noak\n")
    data = read(path)
    assert same(decoded(data.train), images)
    fine = [["cod", "rose", "baby", "oak"][row] for row in labels[:, 1]]
    assert [data.labels[row] for row in data.train["label"]] == fine
    assert data.train["coarse_label"] == [["fish", "flowers", "people", "trees"][row] for row in labels[:, 0]]
    coarse = read(path, label="coarse_label")
    assert set(coarse.labels) <= {"fish", "flowers", "people", "trees"}
    write(tmp_path / "fine_label_names.txt", b"cod\n")
    refuse(path, ["has no name among the 1 beside it"], refused)
    path.write_bytes(content[:-1])
    refuse(path, ["train.bin does not consist of CIFAR's records"], refused)


def test_folders_of_classes(tmp_path: Path) -> None:
    """Any suffix, whatever its case; other files are passed over; sizes and names may be anything."""
    for number, name in enumerate(["dog/b.PNG", "dog/a.png", "cat/1.bmp", "a cat/é.gif", "cat/notes.txt"]):
        if name.endswith("txt"):
            write(tmp_path / name, b"no image")
        else:
            save_png(tmp_path / name, pixels(1, 3 + number, 5, 3)[0])
    data = read(tmp_path)
    assert data.labels == ("a cat", "cat", "dog")
    assert data.train["label"] == [0, 1, 2, 2]
    stored = data.train.cast_column("image", datasets.Image(decode=False))["image"]
    names = [Path(row["path"]).relative_to(tmp_path).as_posix() for row in stored]
    assert names == ["a cat/é.gif", "cat/1.bmp", "dog/a.png", "dog/b.PNG"]
    assert all(row["bytes"] is None for row in stored)  # they stay where they are


def test_folders_of_domains(tmp_path: Path, refused: Refused) -> None:
    for name in ("clipart/dog/1.png", "clipart/cat/1.png", "sketch/dog/1.png"):
        save_png(tmp_path / name, pixels(1, 4, 5, 3)[0])
    data = read(tmp_path)
    assert data.train["domain"] == ["clipart", "clipart", "sketch"]
    assert [data.labels[row] for row in data.train["label"]] == ["cat", "dog", "dog"]
    save_png(tmp_path / "dog" / "2.png", pixels(1, 4, 5, 3)[0])
    refuse(tmp_path, ["expected class/file or domain/class/file for all files, got"], refused)


def test_folders_that_are_laid_out_otherwise(tmp_path: Path, refused: Refused) -> None:
    save_png(tmp_path / "deep" / "a" / "b" / "c" / "1.png", pixels(1, 4, 5)[0])
    refuse(tmp_path / "deep", ["for all files, got a/b/c/1.png"], refused)
    (tmp_path / "none" / "dog").mkdir(parents=True)
    refuse(
        tmp_path / "none",
        ["holds no csv, tsv, txt, json, jsonl, parquet or Excel file, no images and no folders"],
        refused,
    )
    write(tmp_path / "weights" / "x" / "pytorch_model.bin", b"1")
    refuse(tmp_path / "weights", ["weights holds none (.png"], refused)


def test_folders_with_metadata(tmp_path: Path, refused: Refused) -> None:
    """As of ``datasets``' imagefolder: the columns are those of the table, wherever the images are."""
    images = [save_png(tmp_path / folder / "1.png", pixels(1, 4, 3, 3)[0]) for folder in ("a", "a/b", ".")]
    metadata = tmp_path / "metadata.csv"
    metadata.write_text("file_name,species,age,ward\n1.png,cat,3,north\na/b/1.png,dog,4,south\na/1.png,cat,5,north\n")
    data = read(tmp_path, label="species")
    assert same(decoded(data.train), [np.asarray(Image.open(images[number])) for number in (2, 1, 0)])
    assert [data.labels[row] for row in data.train["label"]] == ["cat", "dog", "cat"]
    assert (data.train["ward"], data.train["age"]) == (["north", "south", "north"], [3, 4, 5])
    metadata.unlink()
    rows = [{"file_name": "a/1.png", "label": 1}, {"file_name": "1.png", "label": 0}]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read(tmp_path).labels == ("0", "1")
    refused("data.label", "species", ["no column named"], lambda: read(tmp_path, label="species"))
    (tmp_path / "metadata.jsonl").unlink()
    for columns, words in (
        ("file,label\n1.png,a\n", ["`file_name`"]),
        ("left_file_name,label\n1.png,a\n", ["has no column file_name"]),
    ):
        metadata.write_text(columns)
        refuse(tmp_path, words, refused)


def test_folders_that_datasets_would_leave_out_or_fail_on(tmp_path: Path, refused: Refused) -> None:
    for name in ("cat/1.png", "dog/1.png"):
        save_png(tmp_path / name, pixels(1, 4, 5, 3)[0])
    with zipfile.ZipFile(tmp_path / "cat" / "more.zip", "w") as archive:
        archive.writestr("cat/2.png", png(pixels(1, 4, 5, 3)[0]))
    assert len(read(tmp_path).train) == 2  # archives inside are no part of it
    (tmp_path / "cat" / "more.zip").write_bytes(b"damaged")
    refuse(tmp_path, ["cannot be read as images"], refused)
    (tmp_path / "cat" / "more.zip").unlink()
    (tmp_path / "metadata.csv").write_text("file_name,label\n")
    refuse(tmp_path, ["cannot be read as images"], refused)
    (tmp_path / "metadata.csv").unlink()
    save_png(tmp_path / "__unknown__" / "1.png", pixels(1, 4, 5, 3)[0])
    refuse(tmp_path, ["rename __unknown__"], refused)


def test_hidden_images_are_no_examples_and_a_name_may_look_like_a_pattern(tmp_path: Path) -> None:
    for name in ("cat/[1].png", "dog/1.png", ".trash/2.png", "__MACOSX/dog/1.png", "cat/.2.png"):
        save_png(tmp_path / "scans [v2] *" / name, pixels(1, 4, 5, 3)[0])
    save_png(tmp_path / "scans v" / "bird/1.png", pixels(1, 4, 5, 3)[0])
    data = read(tmp_path / "scans [v2] *")
    assert (data.labels, len(data.train)) == (("cat", "dog"), 2)


def table(path: Path, **columns: list[Any]) -> Path:
    datasets.Dataset.from_dict(columns).to_csv(str(path), index=False)
    return path


def test_csv_files_with_paths(tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    """As seen from the file, or absolute; wherever the command was given."""
    images = [save_png(tmp_path / "in" / f"{n}.png", pixels(1, 4, 3 + n, 3)[0]) for n in range(3)]
    paths = ["in/0.png", str(images[1]), "in/2.png"]
    path = table(tmp_path / "list.csv", file=paths, kind=["b", "a", "b"], site=["x", "y", "y"])
    for where, folder in ((path, tmp_path), ("list.csv", tmp_path), (f"{tmp_path.name}/list.csv", tmp_path.parent)):
        monkeypatch.chdir(folder)
        data = read(where, image="file", label="kind")
        assert same(decoded(data.train), [np.asarray(Image.open(one)) for one in images])
        assert (data.labels, data.train["label"], data.train["site"]) == (("a", "b"), [1, 0, 1], ["x", "y", "y"])
    refused("data.image", "image", ["no column named", "file"], lambda: read(path, label="kind"))
    numbers = tmp_path / "n.jsonl"
    numbers.write_text('{"image": 1, "label": "a"}\n{"image": 2, "label": "b"}\n')
    refused("data.image", "image", ["not images or paths of images", "int64"], lambda: read(numbers))
    blank = table(tmp_path / "list.csv", image=["in/0.png", "", "in/2.png", "in/1.png"], label=["a", "b", "b", ""])
    refuse(blank, ["row 3 of", "has no image in column 'image'"], refused)
    kept = read(blank, invalid="skip")
    assert (len(kept.train), kept.dropped) == (2, 2)


def hub_table(images: list[bytes | None], labels: list[int], **names: str) -> datasets.Dataset:
    """As the hub's parquet files are: images as bytes with a name, labels as numbers with names in the metadata."""
    image, label = names.get("image", "image"), names.get("label", "label")
    features = datasets.Features({image: datasets.Image(), label: datasets.ClassLabel(names=["zebra", "ant"])})
    rows = [None if content is None else {"bytes": content, "path": f"{n}.png"} for n, content in enumerate(images)]
    return datasets.Dataset.from_dict({image: rows, label: labels}, features=features)


@pytest.mark.parametrize("options", [{}, {"invalid": "skip"}])
def test_parquet_as_the_hub_writes_it(options: dict[str, bool], tmp_path: Path) -> None:
    images = pixels(4, 5, 3, 3)
    path = tmp_path / "train.parquet"
    hub_table([png(image) for image in images], [1, 0, 1, 1], image="img").to_parquet(path)
    data = read(path, image="img", **options)
    assert same(decoded(data.train), images)
    assert data.labels == ("ant", "zebra")
    assert [data.labels[row] for row in data.train["label"]] == ["ant", "zebra", "ant", "ant"]


def test_rows_without_an_image(tmp_path: Path, refused: Refused) -> None:
    """A null, and the pair of nulls that some writers leave in its place."""
    path = tmp_path / "train.parquet"
    hub_table([png(pixels(1, 4, 5)[0]), None, *(png(pixels(1, 4, 5)[0]) for _ in range(2))], [1, 0, 0, -1]).to_parquet(
        path
    )
    refuse(path, ["has no image in column 'image'", "row 2 of"], refused)
    assert (len(read(path, invalid="skip").train), read(path, invalid="skip").dropped) == (2, 2)
    struct_type = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = [{"bytes": png(pixels(1, 4, 5)[0]), "path": None}, {"bytes": None, "path": None}] * 2
    odd = tmp_path / "odd.parquet"
    pa.parquet.write_table(pa.table({"image": pa.array(rows, struct_type), "label": ["a", "a", "b", "b"]}), odd)
    refuse(odd, ["row 2 of"], refused)
    assert (len(read(odd, invalid="skip").train), read(odd, invalid="skip").dropped) == (2, 2)


def test_a_column_of_the_same_name_gives_way(tmp_path: Path) -> None:
    """The column called image is not the one that was asked for."""
    path = tmp_path / "train.parquet"
    made = hub_table([png(pixels(1, 4, 5)[0])] * 3, [0, 1, 1], image="photo").add_column("image", ["x", "y", "z"])
    made.to_parquet(path)
    data = read(path, image="photo")
    assert data.train.features["image"] == datasets.Image()
    assert data.train.column_names == ["image", "label", "source:image"]


def original(key: str, folder: Path) -> tuple[dict[str, str], int]:
    """The options for a data set's files in their original layout, and the rows of its training part."""
    if key in ("mnist", "fashion-mnist"):
        for name, count in (("train", 12), ("t10k", 4)):
            save_idx(
                folder / f"{name}-images-idx3-ubyte.gz", pixels(count, 28, 28), np.arange(count).astype(np.uint8) % 4
            )
        return {
            part: str(folder / f"{name}-images-idx3-ubyte.gz") for part, name in (("train", "train"), ("test", "t10k"))
        }, 12
    if key == "domainnet":
        for domain in ("real", "sketch"):
            for number in range(6):
                save_png(folder / domain / f"c{number % 2}" / f"{number}.png", pixels(1, 6, 4, 3)[0])
        return {"train": str(folder)}, 12
    if key == "pacs":
        for domain in ("photo", "sketch"):
            with tarfile.open(folder / f"{domain}.tar", "w") as archive:
                for number in range(6):
                    content = png(pixels(1, 6, 4, 3)[0])
                    info = tarfile.TarInfo(f"{domain}/c{number % 2}/{number}.png")
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))
        return {"train": str(folder / "{domain}.tar")}, 12
    labels = {"cifar10": 1, "cifar100": 2}[key]
    names = ["data_batch_1.bin", "data_batch_2.bin", "test_batch.bin"] if labels == 1 else ["train.bin", "test.bin"]
    counts = [6, 6, 4] if labels == 1 else [12, 4]
    for name, count in zip(names, counts, strict=True):
        content = b"".join(bytes([row % 2] * labels) + pixels(1, 3 * 32 * 32).tobytes() for row in range(count))
        write(folder / name, content)
    return {"train": str(folder if labels == 1 else folder / "train.bin"), "test": str(folder / names[-1])}, 12


KEYS = ("mnist", "fashion-mnist", "cifar10", "cifar100", "domainnet", "pacs")


@pytest.mark.parametrize("key", KEYS)
def test_data_sets_in_their_original_layout(key: str, tmp_path: Path) -> None:
    options, rows = original(key, tmp_path)
    config = parse_config({"data": {"dataset": key, **options}})
    assert (config.task, config.evaluation.metric) == ("image-classification", "accuracy")
    data = load(config.data, task=config.task_columns)
    assert (len(data.train), len(data.test)) == ((rows, 4) if "test" in options else (10, 2))
    assert len(data.labels) == (4 if "mnist" in key else 2)
    assert "domain" in data.train.column_names or key not in ("domainnet", "pacs")
    sizes = {"domainnet": (4, 6), "pacs": (4, 6), "mnist": (28, 28), "fashion-mnist": (28, 28)}
    assert all(image.size == sizes.get(key, (32, 32)) for image in data.train["image"])


@pytest.mark.parametrize("key", KEYS)
def test_data_sets_with_the_hub_s_columns(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a parquet file of the hub's, and from the hub itself."""
    columns = {"cifar10": {"image": "img"}, "cifar100": {"image": "img", "label": "fine_label"}}.get(key, {})
    made = hub_table([png(pixels(1, 8, 6, 3)[0]) for _ in range(10)], [row % 2 for row in range(10)], **columns)
    path = tmp_path / "train-00000-of-00001.parquet"
    made.to_parquet(path)
    data = load(
        parse_config({"data": {"dataset": key, "train": str(path)}}).data, task=get_task("image-classification").columns
    )
    assert (data.labels, len(data.train), len(data.test or ())) == (("ant", "zebra"), 8, 2)
    asked: list[tuple[str, str]] = []

    def answer(path: str, *, name: str | None, split: str) -> datasets.Dataset:
        asked.append((path, split))
        return made

    monkeypatch.setattr(datasets, "load_dataset", answer)
    data = load(parse_config({"data": {"dataset": key}}).data, task=get_task("image-classification").columns)
    splits = ["train"] if key == "pacs" else ["train", "test"]
    assert (len(data.train), len(data.test or ())) == ((8, 2) if key == "pacs" else (10, 10))
    assert [split for _, split in asked] == splits


@pytest.mark.parametrize("key", others_slow(["mnist", "fashion-mnist"], ["mnist"]))
def test_the_real_files(key: str, real_data: Path) -> None:
    """Counts, classes, and the mean brightness that everybody normalizes with (0.1307 and 0.2860 of white)."""
    there = real_data / key
    if not (there / "train-images-idx3-ubyte.gz").is_file():
        pytest.skip(f"no files in {there}")
    options = {
        part: str(there / f"{name}-images-idx3-ubyte.gz") for part, name in (("train", "train"), ("test", "t10k"))
    }
    data = load(
        parse_config({"data": {"dataset": key, "max_examples": 2000, **options}}).data,
        task=get_task("image-classification").columns,
    )
    assert (len(data.train), len(data.test)) == (2000, 2000)
    assert data.labels == tuple("0123456789")
    mean = np.mean([image.mean() for image in decoded(data.train)]) / 255
    assert mean == pytest.approx({"mnist": 0.1307, "fashion-mnist": 0.2860}[key], abs=0.006)


def test_images_of_more_than_8_bits_are_scaled_from_their_range(tmp_path: Path) -> None:
    """Pillow clips them: of 16 bits, nearly everything is white."""
    ramp = np.linspace(0, 1, 35).reshape(5, 7)
    expected = np.rint(255 * ramp)
    for name, image in {
        "16.png": (1000 + 4000 * ramp).astype(np.uint16),
        "16.tif": (1000 + 4000 * ramp).astype(np.uint16),
        "32.tif": (-70000 + 140000 * ramp).astype(np.int32),
        "float.tif": (0.25 + ramp / 2).astype(np.float32),
    }.items():
        path = save_png(tmp_path / name, image)
        found = np.asarray(decode_image({"bytes": path.read_bytes(), "path": None}))
        assert found.shape == (5, 7, 3)
        assert np.abs(found - expected[..., None]).max() <= 1, name
    holes = np.where(ramp > 0.9, np.nan, ramp).astype(np.float32)
    path = save_png(tmp_path / "nan.tif", holes)
    assert np.asarray(decode_image({"bytes": None, "path": str(path)})).max() == 255
    path = save_png(tmp_path / "flat.png", np.full((5, 7), 900, np.uint16))
    assert not np.asarray(decode_image({"bytes": None, "path": str(path)})).any()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_upright(orientation: int) -> None:
    marked = Image.Exif()
    marked[0x0112] = orientation
    upright = Image.fromarray(np.repeat(np.repeat(pixels(1, 4, 6, 3)[0], 16, 0), 16, 1))
    # The transpositions by which a camera's image becomes upright, of which 6 and 8 are each other's inverse.
    turns = {1: None, 2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}
    turn = turns[orientation]
    stored = upright if turn is None else upright.transpose(Image.Transpose(turn))
    file = io.BytesIO()
    stored.save(file, "JPEG", exif=marked, quality=100, subsampling=0)
    found = decode_image({"bytes": file.getvalue(), "path": None})
    assert found.size == upright.size
    assert np.abs(np.asarray(found, int) - np.asarray(upright, int)).max() < 16


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "1", "LA", "CMYK"])
def test_images_of_8_bits_are_as_pillow_reads_them(mode: str) -> None:
    image = Image.fromarray(pixels(1, 9, 13, 3)[0]).convert(mode)
    file = io.BytesIO()
    image.save(file, "TIFF")
    with Image.open(file) as opened:
        expected = np.asarray(opened.convert("RGB"))
    assert np.array_equal(decode_image({"bytes": file.getvalue(), "path": None}), expected)


def damaged_list(folder: Path) -> Path:
    """A csv file of images of which one is missing and one was cut; all others are there."""
    for number in range(6):
        path = folder / f"{number}.jpg"
        Image.fromarray(pixels(1, 40, 60, 3)[0]).save(path)
    (folder / "4.jpg").unlink()
    (folder / "5.jpg").write_bytes((folder / "0.jpg").read_bytes()[:-500])
    return table(folder / "t.csv", image=[f"{number}.jpg" for number in range(6)], label=["a", "b"] * 3)


def test_missing_and_damaged_images(tmp_path: Path, refused: Refused) -> None:
    path = damaged_list(tmp_path)
    words = ["row 6 of", "names the image", "4.jpg", "there is no such file", "data.invalid: skip"]
    refused("data.image", "image", words, read, path)
    data = read(path, invalid="skip")
    assert len(data.train) == 4
    assert data.dropped == 2
    assert data.notes == (f"{path}: rows left out (data.invalid: skip): 2 without a readable image or a label",)


def test_a_list_without_a_single_image(tmp_path: Path, refused: Refused) -> None:
    path = table(tmp_path / "t.csv", image=["1.jpg", "2.jpg"], label=["a", "b"])
    words = ["every row of", "is invalid: row 2 of", "1.jpg", "there is no such file", "relative to the folder of"]
    error = refused("data.image", "image", words, lambda: read(path, invalid="skip"))
    assert "data.invalid" not in str(error)


def test_damaged_images_in_a_folder_and_the_number_of_bytes_that_are_decoded(tmp_path: Path) -> None:
    for number in range(6):
        save_png(tmp_path / "ab"[number % 2] / f"{number}.png", pixels(1, 40, 60, 3)[0])
    damaged = tmp_path / "b" / "5.png"
    damaged.write_bytes(damaged.read_bytes()[:500])
    assert len(read(tmp_path, invalid="skip").train) == 5
    source = read_source(DataConfig(train=str(tmp_path), image="image"), "train", "data")
    assert find_readable_images(source, "image") == [True] * 5 + [False]
    assert find_readable_images(source, "image", 10_000) == [True] * 6  # the first two, of 7 kB each, were decoded
    assert find_readable_images(source, "gone") == [True] * 6


SIDE = 13_000


@pytest.fixture(scope="module")
def bomb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A black PNG of half a megabyte in a folder of a class, whose 500 MB take seconds to compress."""

    def make_chunk(kind: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4) + kind + content + zlib.crc32(kind + content).to_bytes(4)

    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(bytes(1 + 3 * SIDE)) for _ in range(SIDE)) + packer.flush()
    chunks = {b"IHDR": SIDE.to_bytes(4) * 2 + bytes([8, 2, 0, 0, 0]), b"IDAT": rows, b"IEND": b""}
    path = tmp_path_factory.mktemp("images") / "cat" / "bomb.png"
    path.parent.mkdir()
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(make_chunk(*chunk) for chunk in chunks.items()))
    assert path.stat().st_size < 600_000
    return path


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
def test_an_image_with_too_many_pixels_is_refused_before_it_is_decoded(bomb: Path) -> None:
    code = r"""
import pathlib, re, sys
from fedspan.data.images import decode_image
try:
    decode_image({"bytes": None, "path": sys.argv[1]})
except ValueError as error:
    print(error)
status = pathlib.Path("/proc/self/status").read_text()  # getrusage would count the process that forked this one
print(int(re.search(r"VmHWM:\s+(\d+)", status)[1]) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", code, str(bomb)], capture_output=True, text=True, check=True)
    reason, mebibytes = done.stdout.splitlines()
    assert reason == "13000 x 13000 pixels are more than 50 million"
    assert int(mebibytes) < 600


def test_such_an_image_is_not_readable(bomb: Path) -> None:
    Image.new("RGB", (4, 4)).save(bomb.with_name("small.png"))
    source = read_source(DataConfig(train=str(bomb.parents[1]), image="image"), "train", "data")
    assert find_readable_images(source, "image") == [False, True]


def test_an_image_of_a_large_camera_is_read(tmp_path: Path) -> None:
    path = tmp_path / "large.png"
    Image.new("1", (10_000, MAX_PIXELS // 10_000)).save(path)
    assert decode_image({"bytes": None, "path": str(path)}).size == (10_000, MAX_PIXELS // 10_000)


def test_few_large_images_are_in_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_CHUNK", 3)
    monkeypatch.setattr(tasks, "_CHUNK_PIXELS", 100)
    images = [Image.new("RGB", (width, 10)) for width in (5, 5, 1, 20, 1, 1, 1, 1)]
    chunks = list(tasks._split(iter(images)))
    assert [image for chunk in chunks for image in chunk] == images
    assert [[image.width for image in chunk] for chunk in chunks] == [[5, 5], [1], [20], [1, 1, 1], [1]]
