"""The picture of a partition: it is drawn for few and many labels, and touches nothing global."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import datasets
import matplotlib as mpl
import numpy as np
import pytest
from PIL import Image

from fedspan.data import PartitionConfig
from fedspan.data.partition import partition
from fedspan.data.plot import plot_partition
from fedspan.errors import FedspanError


@pytest.mark.parametrize(("labels", "clients"), [(2, 1), pytest.param(12, 50, marks=pytest.mark.slow), (13, 8)])
def test_a_picture_is_drawn(tmp_path: Path, labels: int, clients: int) -> None:
    rows = 20 * clients
    data = datasets.Dataset.from_dict({"text": ["t"] * rows, "label": np.arange(rows) % labels})
    names = ["_pays $5", "costs $3 or $4", "a name\nof two lines", "x" * 90, *(str(label) for label in range(labels))]
    settings = dict(mpl.rcParams)
    path = tmp_path / "partition.png"
    plot_partition(partition(data, PartitionConfig(clients=clients), 0), names[:labels], data, path)
    with Image.open(path) as picture:
        width, height = picture.size
        assert len(picture.convert("RGB").getcolors(maxcolors=2**24) or []) > labels
    assert min(width, height) >= 200
    assert height > clients * 15
    assert dict(mpl.rcParams) == settings


def test_another_data_set_is_refused(
    tmp_path: Path, messages: datasets.Dataset, refused: Callable[..., FedspanError]
) -> None:
    divided = partition(messages, PartitionConfig(clients=4), 0)
    fewer = messages.select(range(9))
    refused("partition", divided.fingerprint[:12], ["has 9"], plot_partition, divided, ["a"], fewer, tmp_path / "p.png")
