"""Images with their classes, in their published formats: idx files, folders of classes, CIFAR's binary batches.

All have the same columns: ``image`` (encoded bytes, or the path of a file; nothing is decoded here), ``label``, and
further columns that the source provides (``domain``, ``coarse_label``).
"""

from __future__ import annotations

import glob
import gzip
import io
import math
import os
import re
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from fedspan.data.folders import infer_classes
from fedspan.data.names import get_arrow_column, make_dataset
from fedspan.data.source import Source
from fedspan.errors import FedspanError

if TYPE_CHECKING:
    import datasets
    import PIL.Image

IMAGES = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
"""Arrow type of an image, as in ``datasets.Image``."""

_IDX = re.compile(r"(.*)images([.-]idx3-ubyte(\.gz)?)")
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
_IDX_BYTES = 1 << 31
"""Maximum number of pixels or labels that an idx file may declare: 2 GiB, four times EMNIST."""
MAX_PIXELS = 50_000_000
"""Maximum number of pixels of an image: half a megabyte of PNG may decode to a gigabyte."""
_SIDE = 32  # rows and columns of CIFAR's images
_PIXELS = 3 * _SIDE * _SIDE


def resolve_paths(source: Source, column: str) -> pa.ChunkedArray:
    """Return a column of paths, which are relative to the file that contains them, as one of images."""
    paths = get_arrow_column(source.dataset, column).to_pylist()
    folders = [os.path.dirname(os.path.expanduser(source.place(row)[0])) for row in range(len(paths))]
    images = [
        {"bytes": None, "path": path and os.path.join(folder, path)}
        for folder, path in zip(folders, paths, strict=True)
    ]
    return pa.chunked_array([pa.array(images, IMAGES)])


def decode_image(image: Mapping[str, Any]) -> PIL.Image.Image:
    """Decode an image: upright by its EXIF orientation, in RGB.

    Grayscale images of 16 or 32 bits and of floats are scaled from their own range to 0 .. 255.

    Args:
        image: The encoded image, under ``bytes``, or its path, under ``path``.

    Raises:
        ValueError: If it cannot be decoded, or has more than `MAX_PIXELS` pixels.
    """
    import PIL.ImageOps

    try:
        with _open(image) as picture:
            PIL.ImageOps.exif_transpose(picture, in_place=True)
            return (_scale(picture) if picture.mode[0] in "IF" else picture).convert("RGB")
    # Pillow's readers raise many errors on damaged files: SyntaxError, struct.error, IndexError, ...
    except Exception as error:
        raise ValueError(str(error) or type(error).__name__) from None


def _open(image: Mapping[str, Any]) -> PIL.Image.Image:
    """Open an encoded image of at most `MAX_PIXELS` pixels without decoding it."""
    import PIL.Image

    picture = PIL.Image.open(io.BytesIO(image["bytes"]) if image["bytes"] else image["path"])
    if picture.width * picture.height > MAX_PIXELS:
        picture.close()
        raise ValueError(f"{picture.width} x {picture.height} pixels are more than {MAX_PIXELS // 10**6} million")
    return picture


def _scale(image: PIL.Image.Image) -> PIL.Image.Image:
    """Scale an image of one channel to 8 bits; Pillow would clip it."""
    import PIL.Image

    pixels = np.nan_to_num(np.asarray(image, np.float64), posinf=0, neginf=0)
    low, high = float(pixels.min()), float(pixels.max())
    return PIL.Image.fromarray(np.rint((pixels - low) * (255 / ((high - low) or 1))).astype(np.uint8))


def find_readable_images(source: Source, column: str, limit: int | None = None) -> list[bool]:
    """Find the rows whose image can be decoded; all of them if the column holds no images.

    Args:
        column: The column of images or of their paths; it may be missing.
        limit: Number of bytes after which the existence of files alone is checked; None: every image is decoded.
    """
    everything = [True] * len(source.dataset)
    if column not in source.dataset.column_names:
        return everything
    images = get_arrow_column(source.dataset, column)
    if pa.types.is_string(images.type) or pa.types.is_large_string(images.type):
        images = resolve_paths(source, column)
    elif not pa.types.is_struct(images.type) or {field.name for field in images.type} != {"bytes", "path"}:
        return everything
    readable: list[bool] = []
    remaining = math.inf if limit is None else limit
    for row in images:
        image = row.as_py()
        readable.append(_is_readable(image, decode=remaining > 0))
        if readable[-1]:
            remaining -= len(image["bytes"]) if image["bytes"] else os.path.getsize(image["path"])
    return readable


def _is_readable(image: Mapping[str, Any] | None, *, decode: bool) -> bool:
    if image is None or not (image["bytes"] or (image["path"] and os.path.isfile(image["path"]))):
        return False
    if not decode:
        return True
    try:
        with _open(image) as picture:
            picture.draft(None, (1, 1))  # JPEG: the whole file, at an eighth of its size
            picture.load()
    except Exception:  # as in decode_image
        return False
    return True


def has_images(path: Path) -> bool:
    """Check whether `read_images` reads a path: an idx file, CIFAR's batches, or a folder that contains images."""
    if os.path.isdir(path):
        return any(_is_image(entry) or entry.suffix == ".bin" for entry in path.rglob("*"))
    return os.path.isfile(path) and (bool(_IDX.fullmatch(path.name)) or path.suffix == ".bin")


def read_images(path: Path, user_path: str, option: str) -> datasets.Dataset:
    """Read the images at a path.

    Args:
        path: An idx file of images, whose labels are beside it under their published name; a folder with one folder per
            class, or with one per domain that contains those; a folder with a metadata file of ``imagefolder``
            (``metadata.csv``, ``.jsonl`` or ``.parquet``) with the column ``file_name`` and all others; a folder of
            CIFAR-10's binary batches, or one binary batch of CIFAR-10 or CIFAR-100.
    """
    try:
        if _IDX.fullmatch(path.name):
            return _make_dataset(_read_idx(path))
        if path.suffix == ".bin":
            return _make_dataset(_read_cifar([path]))
        batches = sorted(path.glob("data_batch_*.bin"))
        return _make_dataset(_read_cifar(batches)) if batches else _read_folders(path)
    # IndexError: an empty metadata file; BadZipFile: datasets looks into the archives of a folder.
    except (OSError, EOFError, ValueError, IndexError, zlib.error, zipfile.BadZipFile) as error:
        problem = f"{user_path} cannot be read as images: {str(error) or type(error).__name__}"
        raise FedspanError(option, user_path, problem=problem) from None


def _make_dataset(columns: Mapping[str, pa.Array]) -> datasets.Dataset:
    import datasets

    features = {name: datasets.Value("string") for name in columns} | {"image": datasets.Image()}
    return make_dataset(pa.table(columns), features)


def _read_idx(path: Path) -> dict[str, pa.Array]:
    labels_path = path.with_name(_IDX.sub(lambda match: match[1] + "labels" + match[2].replace("3", "1"), path.name))
    if not labels_path.is_file():
        raise ValueError(f"its labels are missing: {labels_path.name}")
    images, labels = _read_idx_array(path, 3), _read_idx_array(labels_path, 1)
    if len(images) != len(labels):
        raise ValueError(f"it holds {len(images)} images, {labels_path.name} {len(labels)} labels")
    header = b"P5 %d %d 255\n" % (images.shape[2], images.shape[1])  # a PGM is this header and the pixels
    return {"image": _encode_images([header + image.tobytes() for image in images]), "label": _format_labels(labels)}


def _read_idx_array(path: Path, dimensions: int) -> np.ndarray:
    """Read unsigned bytes in MNIST's format: two zeros, the type, the number of dimensions, their sizes."""
    start = 4 + 4 * dimensions
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        header = file.read(start)
        if len(header) < start or header[:4] != bytes([0, 0, 8, dimensions]):
            raise ValueError(f"{path.name} is not an idx file of unsigned bytes in {dimensions} dimensions")
        sizes = np.frombuffer(header, ">u4", dimensions, 4).tolist()
        declared = math.prod(sizes)
        if declared > _IDX_BYTES:
            raise ValueError(f"{path.name} declares {declared} bytes, more than {_IDX_BYTES >> 30} GiB")
        content = file.read(declared + 1)  # not all: a small compressed file may hold any number of bytes
    if len(content) != declared:
        held = "more" if len(content) > declared else len(content)
        raise ValueError(f"{path.name} declares {declared} bytes and holds {held}")
    return np.frombuffer(content, np.uint8).reshape(sizes)


def _read_cifar(paths: list[Path]) -> dict[str, pa.Array]:
    """Read records of one label (CIFAR-10) or two (CIFAR-100: coarse and fine) and 3 x 32 x 32 pixels by plane."""
    batches = [np.frombuffer(path.read_bytes(), np.uint8) for path in paths]
    size = next((size for size in (_PIXELS + 1, _PIXELS + 2) if all(len(b) % size == 0 for b in batches)), None)
    if size is None:
        raise ValueError(f"{paths[0].name} does not consist of CIFAR's records")
    records = np.concatenate(batches).reshape(-1, size)
    pixels = records[:, -_PIXELS:].reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1)
    header = b"P6 %d %d 255\n" % (_SIDE, _SIDE)
    columns = {"image": _encode_images([header + image.tobytes() for image in pixels])}
    names = {"label": "batches.meta.txt"}
    if size > _PIXELS + 1:
        names = {"coarse_label": "coarse_label_names.txt", "label": "fine_label_names.txt"}
    for column, (label, file) in enumerate(names.items()):
        columns[label] = _format_labels(records[:, column], _read_lines(paths[0].with_name(file)))
    return columns


def _read_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split() if path.is_file() else []


def _format_labels(labels: np.ndarray, names: list[str] | None = None) -> pa.Array:
    if names and labels.size and int(labels.max()) >= len(names):
        raise ValueError(f"label {labels.max()} has no name among the {len(names)} beside it")
    return pa.array([names[label] if names else str(label) for label in labels.tolist()], pa.string())


def _read_folders(root: Path) -> datasets.Dataset:
    """Read a folder with ``datasets``' ``imagefolder``: hidden files are ignored, a metadata file has the columns.

    Without a metadata file, the columns follow from the folders (`infer_classes`).
    """
    import datasets

    # Streamed: otherwise, datasets writes a table of the files into its cache.
    files = datasets.load_dataset(
        "imagefolder",
        data_files={"train": os.path.join(glob.escape(os.path.abspath(root)), "**")},
        split="train",
        streaming=True,
        drop_labels=True,
    )
    features = files.features
    assert features is not None
    if "image" not in features:
        raise ValueError("its metadata file has no column file_name")
    rows = list(files.cast_column("image", datasets.Image(decode=False)))
    if len(features) > 1:
        return make_dataset(pa.Table.from_pylist(rows, features.arrow_schema), features)
    base = os.path.abspath(root)
    read = (Path(row["image"]["path"]) for row in rows if row["image"])
    paths = sorted(path for path in read if _is_image(path) and path.is_absolute())  # an archive's begin with zip://
    for folder in root.rglob("__*"):  # which datasets leaves out
        if folder.is_dir() and folder.name != "__MACOSX":
            raise ValueError(f"folders with names that begin with __ are not read; rename {folder.relative_to(root)}")
    classes = infer_classes([path.relative_to(base).parts for path in paths], root.name, PICTURES)
    images = pa.array([{"bytes": None, "path": str(path)} for path in paths], IMAGES)
    return _make_dataset({"image": images, **{column: pa.array(values) for column, values in classes.items()}})


def make_archived_images(files: Mapping[tuple[str, ...], bytes], name: str) -> datasets.Dataset:
    """Return the images of an archive as a data set, like those of a folder."""
    classes = infer_classes(list(files), name, PICTURES)
    images = [{"bytes": content, "path": "/".join(parts)} for parts, content in files.items()]
    columns = {column: pa.array(values) for column, values in classes.items()}
    return _make_dataset({"image": pa.array(images, IMAGES), **columns})


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in PICTURES


def _encode_images(images: list[bytes]) -> pa.Array:
    return pa.array([{"bytes": image, "path": None} for image in images], IMAGES)
