"""Which client holds which examples, by Flower's partitioners.

Only ``flwr_datasets.partitioner`` is used. Importing it sends nothing (version 0.6.1 posts from ``FederatedDataset``
and from the plots of its ``visualization`` module alone), but loads pyplot and seaborn: it is imported on first use.
"""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import datasets
import numpy as np

from fedspan.data.config import PartitionConfig
from fedspan.data.keyed import generator
from fedspan.data.names import arrow_column, columns_by_likeness, names_of, sort_names
from fedspan.errors import FedspanError

if TYPE_CHECKING:
    from flwr_datasets.partitioner import Partitioner

__all__ = ["assign"]

_ROW, _BY = "row", "by"


def assign(dataset: datasets.Dataset, config: PartitionConfig, seed: int, field: str) -> dict[str, np.ndarray]:
    """Each client's rows of `dataset`.

    Returns:
        client id -> int64 row indices, sorted; every row belongs to exactly one client.

    Raises:
        FedspanError: the data cannot be divided as asked, or a client would have fewer than ``min_examples``.
    """
    if config.partitioner != "natural" and config.clients > len(dataset):
        raise FedspanError(f"{field}.clients", config.clients, f"at most {len(dataset)}, the number of examples")
    if config.partitioner in ("dirichlet", "pathological") and "label" not in dataset.column_names:
        expected = "iid, quantity or natural: these examples have no classes (causal-lm: name a column in data.label)"
        raise FedspanError(f"{field}.partitioner", config.partitioner, expected)
    match config.partitioner:
        case "natural":
            shares = _natural(dataset, config, field)
        case "dirichlet":
            shares = _dirichlet(dataset, config, seed, field)
        case "pathological":
            shares = _pathological(dataset, config, seed, field)
        case _:
            shares = _at_random(dataset, config, seed, field)
    for client, rows in shares.items():
        if len(rows) < config.min_examples:
            raise _too_few(client, len(rows), config, field)
    return shares


def _at_random(dataset: datasets.Dataset, config: PartitionConfig, seed: int, field: str) -> dict[str, np.ndarray]:
    from flwr_datasets.partitioner import ExponentialPartitioner, IidPartitioner, LinearPartitioner, SquarePartitioner

    sizes = {"linear": LinearPartitioner, "square": SquarePartitioner, "exponential": ExponentialPartitioner}
    kind = IidPartitioner if config.partitioner == "iid" else sizes[config.quantity]
    partitioner = kind(num_partitions=config.clients)
    try:
        return _divide(partitioner, _numbered(config.clients), _shuffled_rows(dataset, seed))
    except ValueError as error:  # sizes that round to nothing; the first client's is the smallest
        raise _too_few(_numbered(config.clients)[0], 0, config, field) from error


def _dirichlet(dataset: datasets.Dataset, config: PartitionConfig, seed: int, field: str) -> dict[str, np.ndarray]:
    from flwr_datasets.partitioner import DirichletPartitioner

    labels = arrow_column(dataset, "label").to_numpy()
    partitioner = DirichletPartitioner(
        num_partitions=config.clients,
        partition_by=_BY,
        alpha=config.alpha,
        min_partition_size=config.min_examples,
        seed=_partitioner_seed(seed),
    )
    try:
        return _divide(partitioner, _numbered(config.clients), _shuffled_rows(dataset, seed, labels))
    except ValueError as error:  # it gives up after eleven draws
        expected = (
            f"a larger alpha, fewer clients or a smaller {field}.min_examples: no draw gave each of "
            f"{config.clients} clients {config.min_examples} of the {len(dataset)} examples"
        )
        raise FedspanError(f"{field}.alpha", config.alpha, expected) from error


def _pathological(dataset: datasets.Dataset, config: PartitionConfig, seed: int, field: str) -> dict[str, np.ndarray]:
    from flwr_datasets.partitioner import PathologicalPartitioner

    labels = arrow_column(dataset, "label").to_numpy()
    present = np.unique(labels)
    option, asked = f"{field}.classes_per_client", config.classes_per_client
    if asked > len(present):
        raise FedspanError(option, asked, f"at most {len(present)}, the number of labels in the data")
    # Flower's partitioner drops labels that no client was assigned. With as many bundles of labels as clients or fewer,
    # and its first-deterministic mode, each bundle has a client: all examples are used and nobody exceeds `asked`.
    bundle = math.ceil(len(present) / config.clients)
    if bundle > asked:
        expected = f"at least {bundle}, or {field}.clients at least {math.ceil(len(present) / asked)}: all "
        raise FedspanError(
            option, asked, f"{expected}{len(present)} labels must be held by one of {config.clients} clients"
        )
    order = generator(seed, "partition", "labels").permutation(len(present))
    partitioner = PathologicalPartitioner(
        num_partitions=config.clients,
        partition_by=_BY,
        num_classes_per_partition=asked // bundle,
        class_assignment_mode="first-deterministic",
        seed=_partitioner_seed(seed),
    )
    bundles = order[np.searchsorted(present, labels)] // bundle
    try:
        return _divide(partitioner, _numbered(config.clients), _shuffled_rows(dataset, seed, bundles))
    except ValueError as error:  # a label shared by more clients than it has examples
        expected = f"fewer clients or fewer {option}: more clients would share a label than it has examples"
        raise FedspanError(f"{field}.clients", config.clients, expected) from error


def _natural(dataset: datasets.Dataset, config: PartitionConfig, field: str) -> dict[str, np.ndarray]:
    from flwr_datasets.partitioner import NaturalIdPartitioner

    column, option = config.column or "", f"{field}.column"
    if column not in dataset.column_names:
        there = columns_by_likeness(column, dataset.column_names)
        raise FedspanError(option, column, f"a column of the training data: {there}")
    names = names_of(dataset, column)
    if None in names:
        expected = f"a column with a value in every example; number {names.index(None) + 1} has none"
        raise FedspanError(option, column, expected)
    values = [name for name in names if name is not None]
    rows = datasets.Dataset.from_dict({_ROW: np.arange(len(dataset)), _BY: values})
    with contextlib.redirect_stderr(io.StringIO()):  # it draws a progress bar that cannot be switched off
        shares = _divide(NaturalIdPartitioner(partition_by=_BY), sorted(set(values)), rows)
    return {client: shares[client] for client in sort_names(values)}


def _divide(partitioner: Partitioner, ids: Sequence[str], rows: datasets.Dataset) -> dict[str, np.ndarray]:
    partitioner.dataset = rows
    with warnings.catch_warnings():  # what they warn of is either wanted here (redraws) or an error below
        warnings.simplefilter("ignore")
        parts = [arrow_column(partitioner.load_partition(index), _ROW).to_numpy() for index in range(len(ids))]
    return {client: np.sort(part).astype(np.int64) for client, part in zip(ids, parts, strict=True)}


def _shuffled_rows(dataset: datasets.Dataset, seed: int, by: np.ndarray | None = None) -> datasets.Dataset:
    # The partitioners cut their input in its order, and files are often sorted by label.
    order = generator(seed, "partition", "order").permutation(len(dataset))
    columns = {_ROW: order} if by is None else {_ROW: order, _BY: by[order]}
    return datasets.Dataset.from_dict(columns)


def _partitioner_seed(seed: int) -> int:
    return int(generator(seed, "partition", "shares").integers(2**32))


def _numbered(clients: int) -> list[str]:
    width = max(2, len(str(clients - 1)))
    return [f"client-{number:0{width}d}" for number in range(clients)]


def _too_few(client: str, count: int, config: PartitionConfig, field: str) -> FedspanError:
    remedy = {
        "iid": f"lower it or {field}.clients",
        "quantity": f"lower it or {field}.clients, or choose a milder {field}.quantity (linear, square, exponential)",
        "pathological": f"lower it or {field}.clients",
        "dirichlet": f"lower it or raise {field}.alpha",
        "natural": "lower it or leave that client's rows out of the file",
    }[config.partitioner]
    expected = f"client {client!r} has only {count} of the examples; {remedy}"
    return FedspanError(f"{field}.min_examples", config.min_examples, expected)
