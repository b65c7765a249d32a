"""Dividing examples among clients: complete, disjoint, repeatable, and skewed in the way that was asked for."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable
from typing import Any

import datasets
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

from fedspan.data import PartitionConfig
from fedspan.data.keyed import make_generator
from fedspan.data.partition import Partition, partition
from fedspan.errors import FedspanError
from helpers.label_counts import LABELS

Refused = Callable[..., FedspanError]
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
    before = (np.random.get_state()[1].tolist(), random.getstate())  # pyright: ignore
    again = partition(messages, config, seed=3)
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before  # pyright: ignore
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
    made.dataset = dataset.select(order).add_column("row", order)  # pyright: ignore
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
    def refuse(*args: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    for config in KINDS:
        partition(messages, config, seed=0)
    from flwr_datasets.common import telemetry

    assert telemetry.state["executor"] is None


def test_natural_clients_are_the_values_of_the_column(messages: datasets.Dataset) -> None:
    divided = partition(messages, PartitionConfig(partitioner="natural", column="ward"), seed=0)
    assert [client.id for client in divided.clients] == [f"ward {number}" for number in range(5)]
    wards = np.array(messages["ward"])
    for client in divided.clients:
        assert np.array_equal(client.indices, np.flatnonzero(wards == client.id))


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


def first_format(divided: Partition) -> dict[str, Any]:
    """What fedspan 0.1 wrote: every client an object."""
    clients = [
        {"id": one.id, "train": one.train.tolist(), "validation": one.validation.tolist(), "test": one.test.tolist()}
        for one in divided.clients
    ]
    head = {"format": "fedspan-partition-1", "fingerprint": divided.fingerprint, "examples": divided.examples}
    return {**head, "clients": clients}


@pytest.mark.parametrize("config", KINDS, ids=NAMES)
def test_files_of_the_first_format_are_read(messages: datasets.Dataset, config: PartitionConfig) -> None:
    divided = partition(messages, config, seed=0)
    read = Partition.from_json(json.dumps(first_format(divided)))
    assert read.to_json() == divided.to_json()


def test_a_changed_or_broken_json_is_refused(messages: datasets.Dataset, refused: Refused) -> None:
    divided = partition(messages, PartitionConfig(clients=2), seed=0)
    for content in (json.loads(divided.to_json()), first_format(divided)):
        rows = content["rows"] if "rows" in content else content["clients"][0]["train"]
        rows[0], rows[1] = rows[1], rows[0]
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
        ({"clients": 401}, "p.clients", 401, ["at most 400"]),
        ({"clients": 300}, "p.min_examples", 2, ["client 'client-100' has only 1", "p.clients"]),
        ({"partitioner": "quantity", "clients": 300}, "p.min_examples", 2, ["'client-000' has only 0", "p.quantity"]),
        (
            {"partitioner": "quantity", "clients": 6, "quantity": "exponential"},
            "p.min_examples", 2, ["'client-00' has only 1", "p.quantity"],
        ),
        (
            {"partitioner": "quantity", "clients": 400, "quantity": "exponential"},
            "p.min_examples", 2, ["'client-000' has only 0"],
        ),
        (
            {"partitioner": "dirichlet", "clients": 50, "alpha": 0.001},
            "p.alpha", 0.001, ["larger alpha", "fewer clients", "p.min_examples", "50 clients 2 of the 400"],
        ),
        ({"partitioner": "pathological", "classes_per_client": 9}, "p.classes_per_client", 9, ["at most 8"]),
        (
            {"partitioner": "pathological", "clients": 3},
            "p.classes_per_client", 2, ["at least 3", "p.clients at least 4", "all 8 labels"],
        ),
        (
            {"partitioner": "pathological", "clients": 390, "classes_per_client": 8},
            "p.clients", 390, ["fewer clients", "share a label"],
        ),
        ({"column": "ward", "clients": 12}, "p.clients", 12, ["a multiple of 5, the number of values of", "'ward'"]),
        (
            {"partitioner": "dirichlet", "column": "ward", "clients": 10, "min_examples": 30},
            "p.alpha", 0.5, ["ward: ward 0 (37), which 2 of the 10 clients share", "no draw gave each of 2 clients 30"],
        ),
        ({"partitioner": "natural", "column": "wrad"}, "p.column", "wrad", ["named 'wrad'", "mean 'ward'"]),
        (
            {"partitioner": "natural", "column": "ward", "min_examples": 40},
            "p.min_examples", 40, ["client 'ward 0' has only 37", "leave that client's rows out"],
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


def test_a_natural_column_with_a_gap_is_refused(refused: Refused) -> None:
    data = datasets.Dataset.from_dict({"text": ["t"] * 3, "label": [0, 1, 0], "ward": ["a", " ", "b"]})
    config = PartitionConfig(partitioner="natural", column="ward")
    refused("partition.column", "ward", ["example 2 has no value"], partition, data, config, 0)


def test_an_id_that_no_header_takes_is_refused() -> None:
    names = ["a" * 256, "b" * 257]
    dataset = datasets.Dataset.from_dict({"label": [0, 1] * 10, "site": names * 10})
    config = PartitionConfig(partitioner="natural", column="site")
    with pytest.raises(FedspanError, match=r"`partition\.column`: a value of 257 characters.*at most 256 characters"):
        partition(dataset, config, 0)
    assert len(partition(dataset.filter(lambda row: row["site"] == names[0]), config, 0).clients) == 1
