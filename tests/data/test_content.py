"""The identity of data by their content, and equal examples across parts."""

import csv
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedspan.data import PartitionConfig, duplicates
from fedspan.data.config import DataConfig
from fedspan.data.content import compute_content_digest
from fedspan.data.loading import load
from fedspan.data.partition import Partition, partition
from fedspan.errors import FedspanError
from fedspan.tasks.registry import get_task


def digest(where: object) -> str:
    return compute_content_digest(str(where), "data.train")


def test_a_file_is_its_content(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text,label\n")
    (tmp_path / "b.tsv").write_bytes(b"text,label\n")
    (tmp_path / "link").symlink_to(tmp_path / "a.csv")
    inner = hashlib.sha256(b"text,label\n").hexdigest()
    assert digest(tmp_path / "a.csv") == hashlib.sha256(f"files\n{inner}".encode()).hexdigest()
    assert digest(tmp_path / "a.csv") == digest(tmp_path / "b.tsv") == digest(tmp_path / "link")
    (tmp_path / "b.tsv").write_bytes(b"text,label\nx,y\n")
    assert digest(tmp_path / "a.csv") != digest(tmp_path / "b.tsv")


def test_a_folder_and_a_pattern_are_all_their_files(tmp_path: Path) -> None:
    for folder, names in (("one", ("a.csv", "b.csv")), ("two", ("z.csv", "c.csv"))):
        (tmp_path / folder / "deep").mkdir(parents=True)
        (tmp_path / folder / names[0]).write_text("first")
        (tmp_path / folder / names[1]).write_text("second")
        (tmp_path / folder / ".hidden").write_text(folder)
    assert digest(tmp_path / "one") == digest(tmp_path / "two") == digest(tmp_path / "one" / "{name}.csv")
    (tmp_path / "two" / "deep" / "d.csv").write_text("third")
    assert digest(tmp_path / "one") != digest(tmp_path / "two")


def test_a_name_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert digest("owner/set") != digest("owner/other")
    assert digest("owner/set") == digest("owner/set")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.csv").touch()

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(FedspanError, match=r"`data\.train`.*Permission denied"):
        digest(tmp_path / "a.csv")


def test_an_unchanged_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of the same size is noticed, also if the time of the last change is put back."""
    opened: list[str] = []
    file, compute = tmp_path / "train.csv", hashlib.file_digest

    def record(stream: Any, name: str) -> Any:
        opened.append(stream.name)
        return compute(stream, name)

    monkeypatch.setattr(hashlib, "file_digest", record)

    def write(text: str) -> None:
        replacement = tmp_path / ".new"
        replacement.write_text(text)
        os.utime(replacement, (10**9, 10**9))
        replacement.replace(file)

    write("a,b")
    first = digest(tmp_path)
    assert (digest(tmp_path), digest(file), opened) == (first, first, [str(file)])
    write("c,d")
    assert digest(file) != first
    assert len(opened) == 2
    os.utime(file)  # just changed: it may change again without another time
    digest(file)
    digest(file)
    assert len(opened) == 4


Refused = Callable[..., FedspanError]


def table(path: Path, rows: Sequence[tuple[str, ...]], *header: str) -> str:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return str(path)


def parts_of(parts: Partition) -> dict[int, tuple[int, int]]:
    """Client and split of each row."""
    return {
        int(row): (number, split)
        for number, client in enumerate(parts.clients)
        for split, rows in enumerate((client.train, client.validation, client.test))
        for row in rows
    }


REPEATED = [(f"text {number % 40}", "ab"[number % 2]) for number in range(120)]


def test_test_examples_that_are_in_train_are_counted(tmp_path: Path) -> None:
    train = table(tmp_path / "train.csv", REPEATED[:40], "text", "label")
    test = table(tmp_path / "test.csv", [(" text 3 ", "b"), ("text 4", "b"), ("new", "a")], "text", "label")
    data = load(DataConfig(train=train, test=test))
    assert data.notes == ("duplicates: 2 of 3 test examples also occur in data.train",)
    assert load(DataConfig(train=train)).notes == ()


def test_duplicates_of_a_file_are_counted_and_can_be_kept_together(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", REPEATED, "note", "label")
    how = PartitionConfig(clients=4)
    data = load(DataConfig(train=path, text="note"))
    assert "held-out test examples also occur in training (data.group: note keeps" in data.notes[0]
    parts = partition(data.train, how, 0)
    (note,) = duplicates.describe_shared(data.train, parts, DataConfig(train=path, text="note"), False)
    assert "training examples occur at several clients (data.group: note keeps equal examples together)" in note

    config = DataConfig(train=path, text="note", group="note")
    data = load(config)
    assert not set(data.train["text"]) & set(data.test["text"])
    assert 15 <= len(data.test) <= 33  # a fifth of 120, in whole groups of 3
    assert data.notes == ()
    parts = partition(data.train, how, 0, groups=data.groups)
    assert duplicates.find_shared_between_clients(data.train, parts) == (0, 0)
    assert duplicates.describe_shared(data.train, parts, config, False) == ()
    assert sum(len(client.indices) for client in parts.clients) == len(data.train)
    assert all(len(client.train) and len(client.validation) and len(client.test) for client in parts.clients)


def test_a_column_of_a_few_values_is_hardly_one_of_contents() -> None:
    shops = datasets.Dataset.from_dict({"text": [f"shop {number % 6}" for number in range(60)]})
    assert (
        duplicates.advise_grouping(shops, "s") == "only 6 of 60 examples are distinct: check that s is the right column"
    )
    assert duplicates.advise_grouping(shops.select(range(59)), "s") == "data.group: s keeps equal examples together"


def test_counts_are_those_of_the_rows() -> None:
    data = datasets.Dataset.from_dict({"text": ["a", "a", "b", "b", "c", "d"]})
    rows = [([0, 4], [1], []), ([2, 5], [], [3])]
    from fedspan.data.partition import ClientPart

    clients = [ClientPart(str(number), *map(np.array, part)) for number, part in enumerate(rows)]
    assert duplicates.find_shared_between_clients(data, Partition(clients, 6)) == (2, 0)
    rows = [([0, 4], [], []), ([1, 2, 3], [5], [])]
    clients = [ClientPart(str(number), *map(np.array, part)) for number, part in enumerate(rows)]
    assert duplicates.find_shared_between_clients(data, Partition(clients, 6)) == (0, 2)


def test_pairs_are_equal_if_both_texts_are() -> None:
    data = datasets.Dataset.from_dict({"text": ["a", "a", "a"], "text_pair": ["b", "c", " b"]})
    codes = duplicates.encode_contents(data)[0]
    assert codes[0] == codes[2] != codes[1]


def test_images_are_equal_if_their_files_are(tmp_path: Path) -> None:
    for label, names in (("a", (1, 2, 1)), ("b", (1, 3, 4))):
        (tmp_path / label).mkdir()
        for number, shade in enumerate(names):
            Image.new("L", (8, 8), shade).save(tmp_path / label / f"{number}.png")
    data = load(
        DataConfig(train=str(tmp_path), test_fraction=0, group="image"), task=get_task("image-classification").columns
    )
    first = data.groups[0]
    assert (data.groups == first).tolist() == [True, False, True, True, False, False]
    assert len(set(data.groups.tolist())) == 4


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 12), min_size=30, max_size=80),
    st.sampled_from(["iid", "dirichlet", "pathological", "quantity"]),
    st.integers(0, 3),
)
def test_groups_stay_in_one_part_of_one_client(drawn: list[int], partitioner: str, seed: int) -> None:
    data = datasets.Dataset.from_dict(
        {"text": [str(at) for at in range(len(drawn))], "label": [at % 2 for at in drawn]}
    )
    how = PartitionConfig.model_validate({"partitioner": partitioner, "clients": 3, "min_examples": 1, "alpha": 5.0})
    groups = np.array(drawn, np.int64)
    try:
        parts = partition(data, how, seed, groups=groups)
    except FedspanError as error:  # few groups, or a draw that leaves a client without any
        if error.field.removeprefix("partition.") not in ("clients", "alpha", "min_examples", "classes_per_client"):
            raise
        return
    where = parts_of(parts)
    assert sorted(where) == list(range(len(drawn)))
    assert len({(group, where[row]) for row, group in enumerate(drawn)}) == len(set(drawn))
    assert all(len(client.train) for client in parts.clients)


def test_groups_of_a_column_and_rows_without_one(tmp_path: Path, refused: Refused) -> None:
    rows = [(f"text {at}", "ab"[at % 2], "p" if at < 3 else "", f"site {at % 2}") for at in range(8)]
    path = table(tmp_path / "t.csv", rows, "text", "label", "patient", "site")
    config = DataConfig(train=path, group="patient", test_fraction=0)
    data = load(config)
    assert len(set(data.groups[:3].tolist())) == 1
    assert len(set(data.groups.tolist())) == 6
    natural = PartitionConfig(partitioner="natural", column="site")
    words = ["1 groups (data.group) have rows of several values, such as 'site 0' and 'site 1'"]
    refused("partition.column", "site", words, lambda: partition(data.train, natural, 0, groups=data.groups))
    split = PartitionConfig(column="site", clients=2)
    refused("partition.column", "site", words, lambda: partition(data.train, split, 0, groups=data.groups))
    wrong = DataConfig(train=path, group="patinet", test_fraction=0)
    refused("data.group", "patinet", ["Did you mean 'patient'"], load, wrong)
    one = DataConfig(train=table(tmp_path / "u.csv", [(*row[:2], "p") for row in rows], "text", "label", "patient"))
    words = ["all rows are one group"]
    refused("data.group", "patient", words, load, one.model_copy(update={"group": "patient"}))


def test_a_label_can_be_a_group(tmp_path: Path) -> None:
    config = DataConfig(train=table(tmp_path / "t.csv", REPEATED, "text", "kind"), label="kind", group="kind")
    data = load(config.model_copy(update={"test_fraction": 0.0}))
    assert duplicates.encode_groups(data.train, config, "data").tolist() == data.groups.tolist()
    assert len(set(data.groups.tolist())) == 2


def test_parts_of_a_client_have_whole_groups_and_its_labels() -> None:
    groups = np.repeat(np.arange(40), 3)
    labels = np.repeat((np.arange(40) % 4 == 0).astype(np.int64), 3)
    data = datasets.Dataset.from_dict({"text": ["x"] * 120, "label": labels.tolist()})
    for seed in range(5):
        parts = partition(data, PartitionConfig(clients=1, validation=0.2, test=0.2), seed, groups=groups)
        (client,) = parts.clients
        for rows in (client.validation, client.test):
            assert len(rows) == 24
            assert np.bincount(labels[rows]).tolist() == [18, 6]
