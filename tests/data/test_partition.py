"""Dividing examples among clients: complete, disjoint, repeatable, and skewed in the way that was asked for."""

import json
import random
import socket
from pathlib import Path
from unittest.mock import Mock

import datasets
import matplotlib as mpl
import numpy as np
import pytest
from flwr_datasets.partitioner import (
    DirichletPartitioner,
    ExponentialPartitioner,
    IidPartitioner,
    LinearPartitioner,
    NaturalIdPartitioner,
    SquarePartitioner,
)
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from fedspan.data import DataConfig, PartitionConfig
from fedspan.data.keyed import make_generator
from fedspan.data.loading import load
from fedspan.data.names import find_source_column, list_source_columns, read_names, sort_names
from fedspan.data.partition import Partition, draw_groups, partition
from fedspan.data.plot import plot_partition
from fedspan.tasks.registry import get_task
from helpers import refusals
from helpers.refusals import Refused

KINDS = [
    PartitionConfig(clients=7),
    PartitionConfig(partitioner="dirichlet", clients=7, alpha=0.5),
    PartitionConfig(partitioner="pathological", clients=6, classes_per_client=3),
    PartitionConfig(partitioner="natural", column="ward"),
    PartitionConfig(partitioner="dirichlet", column="ward", clients=10, min_examples=4),
    PartitionConfig(partitioner="quantity", clients=7),
    PartitionConfig(partitioner="quantity", clients=5, quantity="square"),
    PartitionConfig(partitioner="quantity", clients=4, quantity="exponential"),
]
NAMES = [f"{config.partitioner} {config.column or config.quantity}" for config in KINDS]
UNDIVIDED = [config for config in KINDS if config.partitioner == "natural" or config.column is None]


@pytest.mark.parametrize("config", KINDS, ids=NAMES)
def test_every_example_is_in_exactly_one_part_of_one_client(
    messages: datasets.Dataset, config: PartitionConfig
) -> None:
    divided = partition(messages, config, seed=3)
    parts = [part for client in divided.clients for part in (client.train, client.validation, client.test)]
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(messages)))
    assert {part.dtype for part in parts} == {np.dtype(np.int64)}
    assert all(len(client.train) and len(client.validation) and len(client.test) for client in divided.clients)
    assert not any(part.flags.writeable for part in parts)


@pytest.mark.parametrize("config", KINDS, ids=NAMES)
def test_the_seed_alone_decides(messages: datasets.Dataset, config: PartitionConfig) -> None:
    np.random.seed(1)
    random.seed(1)
    first = partition(messages, config, seed=3)
    np.random.seed(2)
    random.seed(2)
    before = (np.random.get_state()[1].tolist(), random.getstate())
    again = partition(messages, config, seed=3)
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before
    assert again.to_json() == first.to_json()
    assert partition(messages, config, seed=4).fingerprint != first.fingerprint


def test_the_indices_of_a_seed_stay_those_of_today(messages: datasets.Dataset) -> None:
    """Results are published with a seed: a change of this fingerprint makes them irreproducible."""
    config = PartitionConfig(partitioner="dirichlet", clients=5, alpha=0.3)
    assert partition(messages, config, seed=0).fingerprint == (
        "0185adcb2af5779028c94942c83e8309806abcff9db241fcfd18f7ca56240c0c"
    )


def by_flower(dataset: datasets.Dataset, config: PartitionConfig, seed: int) -> list[list[int]]:
    """The clients' rows by Flower's own code, from the same draws."""
    order = make_generator(seed, "partition", "order").permutation(len(dataset))
    kinds = {"linear": LinearPartitioner, "square": SquarePartitioner, "exponential": ExponentialPartitioner}
    match config.partitioner:
        case "natural":
            made, order = NaturalIdPartitioner(partition_by="ward"), np.arange(len(dataset))
        case "dirichlet":
            drawn = int(make_generator(seed, "partition", "shares").integers(2**32))
            made = DirichletPartitioner(config.clients, "label", config.alpha, config.min_examples, seed=drawn)
        case "quantity":
            made = kinds[config.quantity](config.clients)
        case _:
            made = IidPartitioner(config.clients)
    made.dataset = dataset.select(order).add_column("row", order)
    return [sorted(made.load_partition(number)["row"]) for number in range(made.num_partitions)]


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize(
    "config",
    [
        *(config for config in UNDIVIDED if config.partitioner != "pathological"),
        PartitionConfig(clients=150),
        PartitionConfig(partitioner="dirichlet", clients=30, alpha=1.0),  # redraws
        PartitionConfig(partitioner="dirichlet", clients=4, alpha=1e-3, min_examples=1),
    ],
)
def test_the_rows_are_those_of_flower(messages: datasets.Dataset, config: PartitionConfig, seed: int) -> None:
    divided = partition(messages, config, seed)
    assert [client.indices.tolist() for client in divided.clients] == by_flower(messages, config, seed)


def test_nothing_is_sent_and_no_global_is_set(messages: datasets.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", Mock(side_effect=AssertionError("a connection was opened")))
    for config in KINDS:
        partition(messages, config, seed=0)
    from flwr_datasets.common import telemetry

    assert telemetry.state["executor"] is None


def test_natural_clients_are_sorted_by_number_and_keep_their_split_when_others_join() -> None:
    hospital = [2] * 10 + [10] * 10 + [9] * 10
    data = datasets.Dataset.from_dict({"text": ["t"] * 30, "label": [0, 1] * 15, "hospital": hospital})
    config = PartitionConfig(partitioner="natural", column="hospital")
    divided = partition(data, config, seed=0)
    assert [client.id for client in divided.clients] == ["2", "9", "10"]
    fewer = partition(data.select(range(20)), config, seed=0)
    assert np.array_equal(fewer.clients[0].test, divided.clients[0].test)


@pytest.mark.parametrize("partitioner", ["iid", "dirichlet", "pathological", "quantity"])
def test_with_a_column_each_value_is_divided_on_its_own(messages: datasets.Dataset, partitioner: str) -> None:
    options = {"column": "ward", "clients": 10, "alpha": 0.3, "classes_per_client": 4}
    config = PartitionConfig.model_validate({"partitioner": partitioner, **options})
    divided = partition(messages, config, seed=0)
    assert [client.id for client in divided.clients] == [
        f"ward {ward}-0{number}" for ward in range(5) for number in (0, 1)
    ]
    wards = np.array(messages["ward"])
    for client in divided.clients:
        assert {*wards[client.indices]} == {client.id.partition("-")[0]}


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 40), validation=st.floats(0, 0.9), test=st.floats(0, 0.9), seed=st.integers(0, 2**16))
@example(size=2, validation=0.1, test=0.1, seed=0)
@example(size=3, validation=0.1, test=0.1, seed=0)
def test_small_clients_train_and_are_measured_where_they_can(
    size: int, validation: float, test: float, seed: int
) -> None:
    assume(validation + test < 1)
    data = datasets.Dataset.from_dict({"text": ["t"] * size, "label": [0] * size})
    (client,) = partition(
        data, PartitionConfig(clients=1, min_examples=1, validation=validation, test=test), seed
    ).clients
    assert len(client.train) >= 1
    assert np.array_equal(client.indices, np.arange(size))
    assert (len(client.test) >= 1) == (test > 0 and size >= 2)
    if size >= 3:
        assert (len(client.validation) >= 1) == (validation > 0)


def test_ids_are_as_wide_as_the_largest() -> None:
    data = datasets.Dataset.from_dict({"text": ["t"] * 101, "label": [0] * 101})
    ids = [client.id for client in partition(data, PartitionConfig(clients=101, min_examples=1), 0).clients]
    assert (ids[0], ids[-1]) == ("client-000", "client-100")
    assert partition(data, PartitionConfig(clients=2), 0).clients[1].id == "client-01"


def test_the_table_counts_labels_and_parts(messages: datasets.Dataset, refused: Refused) -> None:
    divided = partition(messages, PartitionConfig(clients=4), seed=0)
    table = divided.label_table(LABELS, messages)
    assert [(row.train, row.validation, row.test, sum(row.counts)) for row in table] == [(80, 10, 10, 100)] * 4
    held = np.array(messages["label"])[divided.clients[2].indices]
    assert table[2].counts == tuple(np.bincount(held, minlength=8).tolist())
    fewer = messages.select(range(10))
    refused("partition", divided.fingerprint[:12], ["400 examples", "has 10"], divided.label_table, LABELS, fewer)


@pytest.mark.parametrize("config", KINDS, ids=NAMES)
def test_json_gives_the_same_partition_back(messages: datasets.Dataset, config: PartitionConfig) -> None:
    divided = partition(messages, config, seed=0)
    read = Partition.from_json(divided.to_json())
    assert (read.fingerprint, read.to_json()) == (divided.fingerprint, divided.to_json())
    assert read.clients[0].train.dtype == np.int64


def test_a_changed_or_broken_json_is_refused(messages: datasets.Dataset, refused: Refused) -> None:
    divided = partition(messages, PartitionConfig(clients=2), seed=0)
    content = json.loads(divided.to_json())
    content["rows"][0], content["rows"][1] = content["rows"][1], content["rows"][0]
    written = (content["format"], content["fingerprint"])
    refused("run.partition", written, ["was changed"], Partition.from_json, json.dumps(content), "run.partition")
    content = json.loads(divided.to_json())
    content["train"][0] += 1
    refused("partition", json.dumps(content)[:60], ["as fedspan writes it"], Partition.from_json, json.dumps(content))
    refused("partition", "{}", ["as fedspan writes it"], Partition.from_json, "{}")
    refused("partition", "[", ["as fedspan writes it"], Partition.from_json, "[")


def test_clients_are_a_sequence(messages: datasets.Dataset) -> None:
    clients = partition(messages, PartitionConfig(clients=5), seed=0).clients
    assert len(clients) == 5
    assert [client.id for client in clients[1:-1]] == ["client-01", "client-02", "client-03"]
    assert np.array_equal(clients[-1].train, list(clients)[4].train)
    with pytest.raises(IndexError):
        clients[5]


def test_the_fingerprint_is_that_of_ids_and_indices(messages: datasets.Dataset) -> None:
    divided = partition(messages, PartitionConfig(clients=2), seed=0)
    one, two = divided.clients
    swapped = Partition((two, one), divided.examples)
    longer = Partition((one, two), divided.examples + 1)
    assert len({divided.fingerprint, swapped.fingerprint, longer.fingerprint}) == 3


@pytest.mark.parametrize(
    ("settings", "field", "value", "words"),
    [
        (
            {"partitioner": "pathological", "clients": 390, "classes_per_client": 8},
            "p.clients", 390, ["fewer clients", "share a label"],
        ),
        (
            {"partitioner": "dirichlet", "column": "ward", "clients": 10, "min_examples": 30},
            "p.alpha", 0.5, ["ward: ward 0 (37), which 2 of the 10 clients share", "no draw gave each of 2 clients 30"],
        ),
        (
            {"partitioner": "pathological", "clients": 40, "min_examples": 20},
            "p.min_examples", 20, ["has only", "p.clients"],
        ),
    ],
)  # fmt: skip
def test_data_that_cannot_be_divided_so(
    messages: datasets.Dataset,
    refused: Refused,
    settings: dict[str, object],
    field: str,
    value: object,
    words: list[str],
) -> None:
    refused(field, value, words, partition, messages, PartitionConfig.model_validate(settings), 0, "p")


def test_an_id_that_no_header_takes_is_refused() -> None:
    names = ["a" * 256, "b" * 257]
    dataset = datasets.Dataset.from_dict({"label": [0, 1] * 10, "site": names * 10})
    config = PartitionConfig(partitioner="natural", column="site")
    with refusals.refused("partition.column"):
        partition(dataset, config, 0)
    assert len(partition(dataset.filter(lambda row: row["site"] == names[0]), config, 0).clients) == 1


LABELS = [str(label) for label in range(8)]


def counts(dataset: datasets.Dataset, **settings: object) -> np.ndarray:
    """Examples of each label (columns) that each client (rows) holds."""
    divided = partition(dataset, PartitionConfig.model_validate(settings), seed=0)
    return np.array([row.counts for row in divided.label_table(LABELS, dataset)])


@settings(max_examples=10, deadline=None)
@given(clients=st.integers(1, 12), classes=st.integers(1, 8), seed=st.integers(0, 2**32))
def test_pathological_clients_hold_few_labels_and_all_are_held(
    messages: datasets.Dataset, clients: int, classes: int, seed: int
) -> None:
    config = PartitionConfig(partitioner="pathological", clients=clients, classes_per_client=classes)
    if clients * classes < 8:
        with refusals.refused("partition.classes_per_client"):
            partition(messages, config, seed)
        return
    table = partition(messages, config, seed).label_table(LABELS, messages)
    held = np.array([row.counts for row in table])
    assert (np.count_nonzero(held, axis=1) <= classes).all()
    assert held.sum(axis=0).tolist() == [50] * 8


@pytest.mark.parametrize("count", [1, 10, 29])
def test_whole_groups_are_drawn(count: int) -> None:
    groups = np.repeat(np.arange(10), 3)
    drawn = draw_groups(groups, count, np.random.default_rng(0))
    assert len(drawn) % 3 == 0
    assert 0 < len(drawn) < 30
    assert abs(len(drawn) - count) <= 2
    assert len(draw_groups(np.zeros(5, np.int64), 1, np.random.default_rng(0))) == 0


def test_whole_groups_are_drawn_with_each_label_in_proportion() -> None:
    """60 patients with 1 to 6 visits each, a third of them of the rare label."""
    rng = np.random.default_rng(1)
    sizes = rng.integers(1, 7, 60)
    groups, labels = np.repeat(np.arange(60), sizes), np.repeat(np.arange(60) % 3 == 0, sizes).astype(np.int64)
    for seed in range(20):
        drawn = draw_groups(groups, len(groups) // 5, np.random.default_rng(seed), labels)
        rest = np.setdiff1d(np.arange(len(groups)), drawn)
        assert not set(groups[drawn]) & set(groups[rest])
        # Each label is at most half of a group of the largest size away from its share.
        assert np.abs(np.bincount(labels[drawn]) - np.bincount(labels) / 5).max() <= 3
    mixed = rng.integers(0, 3, len(groups))  # groups of several labels
    drawn = draw_groups(groups, len(groups) // 4, np.random.default_rng(0), mixed)
    assert np.abs(np.bincount(mixed[drawn], minlength=3) - np.bincount(mixed) / 4).max() <= 3


def test_values_of_a_column_have_draws_of_their_own() -> None:
    """Else the first clients of all wards would have the same labels."""
    data = datasets.Dataset.from_dict(
        {"text": ["t"] * 240, "label": [row % 4 for row in range(240)], "ward": ["a"] * 120 + ["b"] * 120}
    )
    held = counts(data, partitioner="dirichlet", column="ward", clients=4, alpha=0.5)
    assert held[0].tolist() != held[2].tolist()
    alone = counts(data.select(range(120)), partitioner="dirichlet", column="ward", clients=2, alpha=0.5)
    assert alone.tolist() == held[:2].tolist()  # nor do they depend on which other values there are


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


@pytest.mark.parametrize("column", ["label", "target", "answer", "text_pair", "text", "labels"])
def test_unrelated_columns_assign_and_group_rows(column: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"message": f"a word {at}", "intent": "xy"[at % 2], column: "pqr"[at % 3]} for at in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(train=str(path), text="message", label="intent", group=column, test_fraction=0)
    loaded = load(config)
    assert loaded.labels == ("x", "y")
    assert find_source_column(loaded.train, column) == (column if column == "labels" else f"source:{column}")
    assert loaded.groups.tolist() == [0, 1, 2] * 4
    parts = partition(loaded.train, PartitionConfig(partitioner="natural", column=column, validation=0, test=0), 0)
    assert [client.id for client in parts.clients] == ["p", "q", "r"]
    owned = [sorted(loaded.train["text"][row] for row in client.train) for client in parts.clients]
    assert owned == [sorted(row["message"] for row in rows if row[column] == name) for name in "pqr"]


def test_errors_list_the_columns_by_the_users_names(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"text": f"a word {at}", "label": "pq"[at % 2], "ward": "x"} for at in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load(DataConfig(train=str(path), test_fraction=0), task=get_task("masked-lm").columns)
    assert list_source_columns(loaded.train) == ["text", "label", "ward"]
    with refusals.refused("partition.column") as caught:
        partition(loaded.train, PartitionConfig(partitioner="natural", column="lable"), 0)
    assert "source:" not in str(caught.value)


@given(st.lists(st.text(min_size=1)), st.randoms(use_true_random=False))
def test_the_order_of_names_does_not_depend_on_that_of_the_rows(names: list[str], random: object) -> None:
    shuffled = list(names)
    random.shuffle(shuffled)
    assert sort_names(shuffled) == sort_names(names)
    assert set(sort_names(names)) == set(names)


def test_equal_names_are_one_object() -> None:
    dataset = datasets.Dataset.from_dict(
        {"label": [" a", "b ", None, " a", ""], "number": [1.0, 2.5, float("nan"), 1.0, 3]}
    )
    names = read_names(dataset, "label")
    assert names == ["a", "b", None, "a", None]
    assert names[0] is names[3]
    assert read_names(dataset, "number") == ["1", "2.5", None, "1", "3"]
