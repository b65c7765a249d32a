"""Equal examples in different parts of the data, and groups of examples that belong together."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedspan.data.config import DataConfig
from fedspan.data.names import (
    describe_missing_column,
    find_source_column,
    get_arrow_table,
    list_source_columns,
    read_names,
    trim,
)
from fedspan.data.partition import Partition
from fedspan.errors import FedspanError

if TYPE_CHECKING:
    import datasets

_INPUTS = ("text", "text_pair", "history")
_FEW = 10
"""Mean number of equal examples from which a column hardly holds the examples' contents."""
_CHUNK = 1 << 16


def encode_contents(*parts: datasets.Dataset) -> list[np.ndarray]:
    """Encode the content of every example as a number, equal for equal inputs, regardless of their labels.

    Texts are compared without surrounding spaces, images by their files.

    Returns:
        For each data set, int64, (examples,).
    """
    keys = _make_image_keys(parts) if "image" in parts[0].column_names else map(_make_text_keys, parts)
    coded = pa.concat_arrays([pa.array(key, pa.binary()) for key in keys])
    codes = coded.dictionary_encode().indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return np.split(codes, np.cumsum([len(part) for part in parts])[:-1])


def _make_text_keys(part: datasets.Dataset) -> list[bytes]:
    """Return digests of the texts, which are far smaller than the texts."""
    inputs = part.select_columns([name for name in _INPUTS if name in part.column_names])
    keys: list[bytes] = []
    for start in range(0, len(inputs), _CHUNK):
        table = get_arrow_table(inputs, slice(start, start + _CHUNK))
        columns = [trim(column) for column in table.columns]
        texts = pc.call_function("binary_join_element_wise", [*columns, pa.scalar("\x1f", pa.large_string())])
        keys += [hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts.to_pylist()]
    return keys


def _make_image_keys(parts: Sequence[datasets.Dataset]) -> list[list[bytes]]:
    """Return digests of the images; a file whose size is unique is not read."""
    import datasets

    rows = [
        part.cast_column("image", datasets.Image(decode=False)).select_columns(["image"])["image"][:] for part in parts
    ]
    sizes = Counter(_read_size(row) for part in rows for row in part)
    return [
        [
            (_compute_digest(row) if sizes[_read_size(row)] > 1 else f"{number}/{position}").encode()
            for position, row in enumerate(part)
        ]
        for number, part in enumerate(rows)
    ]


def _read_size(row: dict[str, Any]) -> int:
    if row["bytes"] is not None:
        return len(row["bytes"])
    try:
        return os.path.getsize(row["path"])
    except OSError:  # reported when the image is decoded
        return -1


def _compute_digest(row: dict[str, Any]) -> str:
    if row["bytes"] is not None:
        return hashlib.blake2b(row["bytes"], digest_size=16).hexdigest()
    try:
        with open(row["path"], "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError:
        return str(row["path"])


def encode_groups(dataset: datasets.Dataset, config: DataConfig, field: str) -> np.ndarray | None:
    """Encode the group of each example as a number, int64, (examples,); None if the config has no groups."""
    if config.group is None:
        return None
    if config.group in (config.text, config.image) and {"text", "image"} & set(dataset.column_names):
        return encode_contents(dataset)[0]
    column_by_option = {config.text_pair: "text_pair", config.label or "label": "label"}
    column = find_source_column(dataset, config.group)
    if column is None and column_by_option.get(config.group) in dataset.column_names:
        column = column_by_option[config.group]
    if column is None:
        problem = describe_missing_column(config.group, list_source_columns(dataset))
        raise FedspanError(f"{field}.group", config.group, problem=problem)
    names = read_names(dataset, column)
    numbers: dict[str, int] = {}
    codes = [
        len(dataset) + row if name is None else numbers.setdefault(name, len(numbers)) for row, name in enumerate(names)
    ]
    return np.unique(np.array(codes, np.int64), return_inverse=True)[1].astype(np.int64)


def find_shared_with_test(train: datasets.Dataset, test: datasets.Dataset) -> int:
    """Return the number of test examples that also occur in the training data."""
    train_codes, test_codes = encode_contents(train, test)
    return int(np.isin(test_codes, train_codes).sum())


def advise_grouping(dataset: datasets.Dataset, column: str, field: str = "data") -> str:
    """Return the advice on equal examples: to group them, or to check the column if only a few are distinct."""
    distinct = len(np.unique(encode_contents(dataset)[0]))
    if distinct * _FEW <= len(dataset):  # such as the names of six shops in place of texts
        return f"only {distinct:,} of {len(dataset):,} examples are distinct: check that {column} is the right column"
    return f"{field}.group: {column} keeps equal examples together"


def find_shared_between_clients(dataset: datasets.Dataset, parts: Partition) -> tuple[int, int]:
    """Count equal examples across a partition.

    Returns:
        The number of examples of validation and test parts that also occur in a training part, and the number of
        examples that occur at several clients.
    """
    (codes,) = encode_contents(dataset)
    flat = parts.parts
    sizes = flat.sizes.reshape(-1)
    row_codes = codes[flat.rows]
    is_training = np.repeat(np.arange(len(sizes)) % 3 == 0, sizes)
    client = np.repeat(np.arange(len(sizes)) // 3, sizes)
    trained = np.zeros(int(codes.max()) + 1, bool)
    trained[row_codes[is_training]] = True
    pairs = np.unique(np.stack([row_codes, client]), axis=1)[0]
    is_shared = np.bincount(pairs, minlength=len(trained)) > 1
    return int(trained[row_codes[~is_training]].sum()), int(is_shared[row_codes].sum())


def describe_shared(dataset: datasets.Dataset, parts: Partition, config: DataConfig, natural: bool) -> tuple[str, ...]:
    """Describe equal examples across a partition, as a note; empty if there are none."""
    held_out, shared = find_shared_between_clients(dataset, parts)
    findings: list[str] = []
    if held_out:
        findings.append(f"{held_out:,} validation and test examples of clients also occur in training parts")
    if shared:
        findings.append(f"{shared:,} of {len(dataset):,} training examples occur at several clients")
    if not findings:
        return ()
    column = config.image if "image" in dataset.column_names else config.text
    advice = "the column of clients determines the partition" if natural else advise_grouping(dataset, column)
    return (f"duplicates: {' and '.join(findings)} ({advice})",)
