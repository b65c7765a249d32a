"""Assignment of examples to clients: Flower's partitioners, and the same partitions, vectorized.

Where a federation may have 100,000 clients (iid, dirichlet, natural, quantity) rows are cut and sorted as flat arrays,
with the draws and the arithmetic of ``flwr_datasets.partitioner``, so that both give the same rows; Flower's own code
copies the data set for every client. Only that module is used. Importing it sends nothing (version 0.6.1 posts from
``FederatedDataset`` and from the plots of its ``visualization`` module alone), but loads pyplot and seaborn, so it is
imported on first use.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedspan.data.config import PartitionConfig
from fedspan.data.keyed import make_generator
from fedspan.data.names import get_arrow_column, read_required_names, sort_names
from fedspan.errors import FedspanError

if TYPE_CHECKING:
    import datasets
    from flwr_datasets.partitioner import Partitioner

_ROW, _BY = "row", "by"
_ID = "client-"
"""Beginning of the ids of clients without names."""
_DRAWS = 11
"""Number of draws after which Flower's DirichletPartitioner gives up."""


@dataclass(frozen=True, eq=False)
class Shares:
    """The assignment of rows to clients."""

    ids: tuple[str, ...]
    rows: np.ndarray
    """Row indices by client, int64, (examples,); ascending within a client, every row of the data set once."""
    bounds: np.ndarray
    """Client k has ``rows[bounds[k]:bounds[k + 1]]``; int64, (clients + 1,)."""

    @classmethod
    def from_owners(cls, ids: Sequence[str], owners: np.ndarray) -> Shares:
        """Build the shares in which row k belongs to client number ``owners[k]``."""
        # Stable, so that a client's rows stay in ascending order.
        rows = np.argsort(owners, kind="stable").astype(np.int64)
        return cls(tuple(ids), rows, _compute_bounds(np.bincount(owners, minlength=len(ids))))


def _compute_bounds(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def assign(
    dataset: datasets.Dataset, config: PartitionConfig, seed: int, field: str, groups: np.ndarray | None = None
) -> Shares:
    """Assign the rows of `dataset` to clients.

    With groups, a group is assigned like a row: by the label of its first row.

    Args:
        groups: Number of each row's group, int64, (examples,); None: each row on its own.

    Raises:
        FedspanError: If the data cannot be partitioned as requested, a client would have fewer than ``min_examples``,
            or the rows of a group have several values in ``config.column``.
    """
    natural, by_value = config.partitioner == "natural", None
    if groups is not None and config.column is not None:
        by_value = _assign_natural(dataset, config, field)
        _require_unsplit_groups(by_value, groups, config, field)
    if natural and by_value is not None:
        shares = by_value
    elif groups is None or natural:
        shares = _assign_rows(dataset, config, seed, field, None)
    else:
        _, firsts, numbers, sizes = np.unique(groups, return_index=True, return_inverse=True, return_counts=True)
        group_shares = _assign_rows(dataset.select(firsts), config, seed, field, sizes)
        owners = np.empty(len(firsts), np.int64)
        owners[group_shares.rows] = np.repeat(np.arange(len(group_shares.ids)), np.diff(group_shares.bounds))
        shares = Shares.from_owners(group_shares.ids, owners[numbers])
    sizes = np.diff(shares.bounds)
    undersized = np.flatnonzero(sizes < config.min_examples)
    if len(undersized):
        raise _make_too_few_error(shares.ids[undersized[0]], int(sizes[undersized[0]]), config, field)
    return shares


def _assign_rows(
    dataset: datasets.Dataset, config: PartitionConfig, seed: int, field: str, weights: np.ndarray | None
) -> Shares:
    """Assign rows to clients; each row represents ``weights`` examples (None: one)."""
    if config.partitioner != "natural" and config.column is not None:
        return _assign_by_value(dataset, config, seed, field, weights)
    if config.partitioner != "natural" and config.clients > len(dataset):
        unit = "examples" if weights is None else "groups (data.group)"
        raise FedspanError(f"{field}.clients", config.clients, f"at most {len(dataset)}, the number of {unit}")
    match config.partitioner:
        case "natural":
            return _assign_natural(dataset, config, field)
        case "dirichlet":
            return _assign_dirichlet(_get_classes(dataset, config, field), config, seed, field, weights)
        case "pathological":
            return _assign_pathological(_get_classes(dataset, config, field), config, seed, field)
        case _:
            return _assign_at_random(dataset, config, seed, field)


def _require_unsplit_groups(shares: Shares, groups: np.ndarray, config: PartitionConfig, field: str) -> None:
    owners = np.empty(len(groups), np.int64)
    owners[shares.rows] = np.repeat(np.arange(len(shares.ids)), np.diff(shares.bounds))
    pairs = np.unique(np.stack([groups, owners]), axis=1)
    split = pairs[0][:-1][np.diff(pairs[0]) == 0]
    if len(split):
        first, second = (shares.ids[client] for client in pairs[1][pairs[0] == split[0]][:2])
        problem = f"{len(np.unique(split))} groups (data.group) have rows of several values, such as {first!r} and "
        raise FedspanError(f"{field}.column", config.column, problem=f"{problem}{second!r}")


def _assign_at_random(dataset: datasets.Dataset, config: PartitionConfig, seed: int, field: str) -> Shares:
    ids = make_client_ids(config.clients)
    if config.partitioner == "iid":
        sizes = np.full(config.clients, len(dataset) // config.clients)
        sizes[: len(dataset) % config.clients] += 1
    else:
        sizes = _compute_unequal_sizes(len(dataset), config)
    if not sizes.all():  # sizes that round to zero; the first client's is the smallest
        raise _make_too_few_error(ids[0], 0, config, field)
    owners = np.empty(len(dataset), np.int64)
    owners[_shuffle_rows(len(dataset), seed)] = np.repeat(np.arange(config.clients), sizes)
    return Shares.from_owners(ids, owners)


def _compute_unequal_sizes(count: int, config: PartitionConfig) -> np.ndarray:
    """Compute sizes as Flower's Linear-, Square- and ExponentialPartitioner do; the last client gets the rest."""
    number = np.linspace(1, config.clients, config.clients)
    units = {"linear": lambda n: n, "square": np.square, "exponential": np.exp}[config.quantity](number)
    sizes = np.array(units / units.sum() * count, dtype=np.int64)
    sizes[-1] += count - sizes.sum()
    return sizes


def _get_classes(dataset: datasets.Dataset, config: PartitionConfig, field: str) -> np.ndarray:
    """Return the class of each example for partitions by label: its label, or the range that contains its number."""
    if "label" in dataset.column_names:
        if config.bins is not None:
            problem = "these examples have labels, not numbers. Leave it out"
            raise FedspanError(f"{field}.bins", config.bins, problem=problem)
        return get_arrow_column(dataset, "label").to_numpy()
    if config.bins is None or "target" not in dataset.column_names:
        remedy = f"regression: set {field}.bins; causal-lm: name a column in data.label"
        reason = "have several labels each" if "labels" in dataset.column_names else f"have no classes ({remedy})"
        expected = f"iid, quantity or natural: these examples {reason}"
        raise FedspanError(f"{field}.partitioner", config.partitioner, expected)
    numbers = get_arrow_column(dataset, "target").to_numpy()
    if config.bins > (distinct := len(np.unique(numbers))):
        raise FedspanError(f"{field}.bins", config.bins, f"at most {distinct}, the number of distinct numbers")
    edges = np.quantile(numbers, np.linspace(0, 1, config.bins + 1)[1:-1])
    return np.searchsorted(edges, numbers, side="right")


def _assign_dirichlet(
    classes: np.ndarray, config: PartitionConfig, seed: int, field: str, weights: np.ndarray | None
) -> Shares:
    """Partition as Flower's DirichletPartitioner: new shares for each label; redraw all while a client has too few."""
    order = _shuffle_rows(len(classes), seed)
    labels = classes[order]
    rows_by_label = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    rng = np.random.default_rng(_derive_seed(seed))
    alpha = np.full(config.clients, float(config.alpha))
    for _ in range(_DRAWS):
        sizes = np.zeros(config.clients, np.int64)
        owners = np.empty(len(classes), np.int64)
        for rows in rows_by_label:
            ends = (np.cumsum(rng.dirichlet(alpha)) * len(rows)).astype(np.int64)[:-1]
            counts = np.diff(np.minimum(ends, len(rows)), prepend=0, append=len(rows))  # shares may sum to 1 + 2e-16
            owners[order[rows]] = np.repeat(np.arange(config.clients), counts)
            sizes += counts if weights is None else _sum_weights(weights[order[rows]], counts)
        if sizes.min() >= config.min_examples:
            return Shares.from_owners(make_client_ids(config.clients), owners)
    expected = (
        f"a larger alpha, fewer clients or a smaller {field}.min_examples: no draw gave each of "
        f"{config.clients} clients {config.min_examples} of the {len(classes)} examples"
    )
    raise FedspanError(f"{field}.alpha", config.alpha, expected)


def _sum_weights(weights: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the sum of the weights that each client takes in order, int64, (clients,)."""
    return np.diff(np.concatenate([[0], np.cumsum(weights)])[_compute_bounds(counts)])


def _assign_pathological(labels: np.ndarray, config: PartitionConfig, seed: int, field: str) -> Shares:
    import datasets
    from flwr_datasets.partitioner import PathologicalPartitioner

    present = np.unique(labels)
    option, requested = f"{field}.classes_per_client", config.classes_per_client
    if requested > len(present):
        raise FedspanError(option, requested, f"at most {len(present)}, the number of labels in the data")
    # Flower's partitioner drops labels that no client was assigned. With as many bundles of labels as clients or fewer,
    # and its first-deterministic mode, each bundle has a client: all examples are used and no client exceeds `asked`.
    bundle = math.ceil(len(present) / config.clients)
    if bundle > requested:
        expected = f"at least {bundle}, or {field}.clients at least {math.ceil(len(present) / requested)}: all "
        raise FedspanError(
            option, requested, f"{expected}{len(present)} labels must be held by one of {config.clients} clients"
        )
    order = make_generator(seed, "partition", "labels").permutation(len(present))
    partitioner = PathologicalPartitioner(
        num_partitions=config.clients,
        partition_by=_BY,
        num_classes_per_partition=requested // bundle,
        class_assignment_mode="first-deterministic",
        seed=_derive_seed(seed),
    )
    bundles = order[np.searchsorted(present, labels)] // bundle
    try:
        order = _shuffle_rows(len(labels), seed)
        rows = datasets.Dataset.from_dict({_ROW: order, _BY: bundles[order]})
        return _run_partitioner(partitioner, make_client_ids(config.clients), rows)
    except ValueError as error:  # more clients share a label than it has examples
        expected = f"fewer clients or fewer {option}: more clients would share a label than it has examples"
        raise FedspanError(f"{field}.clients", config.clients, expected) from error


def _assign_natural(dataset: datasets.Dataset, config: PartitionConfig, field: str) -> Shares:
    advice = "To leave out examples without a client, set data.invalid: skip."
    values = read_required_names(dataset, config.column or "", f"{field}.column", advice)
    ids = sort_names(values)
    number = {id: index for index, id in enumerate(ids)}
    return Shares.from_owners(ids, np.fromiter((number[value] for value in values), np.int64, len(values)))


def _assign_by_value(
    dataset: datasets.Dataset, config: PartitionConfig, seed: int, field: str, weights: np.ndarray | None
) -> Shares:
    """Partition the examples of each value of a column separately, each among an equal share of the clients."""
    values = _assign_natural(dataset, config, field)
    if config.clients % len(values.ids):
        expected = f"a multiple of {len(values.ids)}, the number of values of column {config.column!r}"
        raise FedspanError(f"{field}.clients", config.clients, expected)
    share = config.clients // len(values.ids)
    part_config = config.model_copy(update={"column": None, "clients": share})
    ids: list[str] = []
    owners = np.empty(len(dataset), np.int64)
    for value, start, stop in zip(values.ids, values.bounds[:-1], values.bounds[1:], strict=True):
        rows = values.rows[start:stop]
        # Keyed by the value: with one seed, all values would draw the same shares.
        value_seed = int(make_generator(seed, "partition", "value", value).integers(2**32))
        part_weights = None if weights is None else weights[rows]
        try:
            part = _assign_rows(dataset.select(rows), part_config, value_seed, field, part_weights)
        except FedspanError as error:
            note = (
                f"This is about the examples with {config.column}: {value} ({len(rows)}), which {share} of the "
                f"{config.clients} clients share"
            )
            requested_clients = config.clients if error.field == f"{field}.clients" else None
            raise error.relocate(error.field, requested_clients, note) from None
        owners[rows[part.rows]] = len(ids) + np.repeat(np.arange(share), np.diff(part.bounds))
        ids += [f"{value}-{id.removeprefix(_ID)}" for id in part.ids]
    return Shares.from_owners(ids, owners)


def _run_partitioner(partitioner: Partitioner, ids: Sequence[str], rows: datasets.Dataset) -> Shares:
    partitioner.dataset = rows
    with warnings.catch_warnings():  # their warnings are about intended redraws or become errors below
        warnings.simplefilter("ignore")
        parts = [get_arrow_column(partitioner.load_partition(index), _ROW).to_numpy() for index in range(len(ids))]
    owners = np.empty(len(rows), np.int64)
    for number, part in enumerate(parts):
        owners[part] = number
    return Shares.from_owners(ids, owners)


def _shuffle_rows(count: int, seed: int) -> np.ndarray:
    """Return rows in random order for the assignment, since files are often sorted by label."""
    return make_generator(seed, "partition", "order").permutation(count)


def _derive_seed(seed: int) -> int:
    return int(make_generator(seed, "partition", "shares").integers(2**32))


def make_client_ids(clients: int) -> list[str]:
    """Return the ids of clients without names, in order: ``client-00`` and so on."""
    width = max(2, len(str(clients - 1)))
    return [f"{_ID}{number:0{width}d}" for number in range(clients)]


def _make_too_few_error(client: str, count: int, config: PartitionConfig, field: str) -> FedspanError:
    remedy = {
        "iid": f"lower it or {field}.clients",
        "quantity": f"lower it or {field}.clients, or choose a milder {field}.quantity (linear, square, exponential)",
        "pathological": f"lower it or {field}.clients",
        "dirichlet": f"lower it or raise {field}.alpha",
        "natural": "lower it or leave that client's rows out of the file",
    }[config.partitioner]
    problem = f"client {client!r} has only {count} of the examples, fewer than {config.min_examples}; {remedy}"
    return FedspanError(f"{field}.min_examples", config.min_examples, problem=problem)
