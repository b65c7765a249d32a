"""A data set partitioned among clients, and each client's examples among training, validation and test."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from scipy.sparse import coo_array

from fedspan.data.assign import Shares, assign
from fedspan.data.config import PartitionConfig
from fedspan.data.keyed import make_generator
from fedspan.data.names import get_arrow_column
from fedspan.errors import FedspanError

if TYPE_CHECKING:
    import datasets

_HEADER = "fedspan-partition-1"
"""Header of a fingerprint's text."""
_FORMAT = "fedspan-partition-2"
"""The file format: the arrays of ``ClientParts``."""
_LONGEST_ID = 256
"""Longest id of a client, as headers have it (``federation.protocol.Name``)."""
_SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, eq=False)
class ClientPart:
    """One client's examples: read-only, sorted, disjoint int64 row indices into the partitioned data set."""

    id: str
    """``client-00`` and so on, or the value of the natural column (any text, not always fit for a file name)."""
    train: np.ndarray
    """Training rows; never empty."""
    validation: np.ndarray
    """Rows for choosing settings; may be empty."""
    test: np.ndarray
    """Rows for the client's own (personalized) accuracy; may be empty."""

    def __post_init__(self) -> None:
        for split in _SPLITS:
            indices = np.array(getattr(self, split), dtype=np.int64)
            indices.setflags(write=False)
            object.__setattr__(self, split, indices)

    @property
    def indices(self) -> np.ndarray:
        """All of the client's row indices, sorted."""
        return np.sort(np.concatenate([self.train, self.validation, self.test]))


class ClientParts(Sequence[ClientPart]):
    """The clients' parts in two flat arrays; each access builds a new `ClientPart`.

    Args:
        sizes: Sizes of each client's parts, int64, (clients, 3): train, validation, test.
        rows: Row indices of the parts in that order, client by client; int64, (examples,).

    Raises:
        ValueError: If the arrays do not fit together.
    """

    def __init__(self, ids: Sequence[str], sizes: np.ndarray, rows: np.ndarray) -> None:
        self.ids = tuple(ids)
        self.sizes = np.array(sizes, np.int64).reshape(-1, len(_SPLITS))
        self.rows = np.array(rows, np.int64).reshape(-1)
        if len(self.sizes) != len(self.ids) or (self.sizes < 0).any() or self.sizes.sum() != len(self.rows):
            raise ValueError("sizes that are not those of the rows")
        self.bounds = np.concatenate([[0], np.cumsum(self.sizes)])
        """Start of each part, and end of the last one; int64, (3 clients + 1,)."""
        for array in (self.sizes, self.rows, self.bounds):
            array.setflags(write=False)

    @classmethod
    def from_clients(cls, clients: Sequence[ClientPart]) -> ClientParts:
        """Return the same parts as flat arrays."""
        if isinstance(clients, ClientParts):
            return clients
        parts = [getattr(client, split) for client in clients for split in _SPLITS]
        rows = np.concatenate(parts) if parts else np.empty(0, np.int64)
        return cls([client.id for client in clients], np.array([len(part) for part in parts]), rows)

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> ClientPart: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ClientPart]: ...
    def __getitem__(self, index: int | slice) -> ClientPart | Sequence[ClientPart]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        bounds = self.bounds[len(_SPLITS) * number :][: len(_SPLITS) + 1].tolist()
        return ClientPart(self.ids[number], *(self.rows[start:stop] for start, stop in pairwise(bounds)))


@dataclass(frozen=True)
class ClientRow:
    """One client's row in a table: its examples of each label (all parts together) and in each part."""

    id: str
    counts: tuple[int, ...]
    train: int
    validation: int
    test: int


@dataclass(frozen=True, eq=False)
class Partition:
    """Assignment of examples to clients."""

    clients: Sequence[ClientPart]
    """Numbered clients in order of their numbers, natural ones sorted by value; built on access if they are
    `ClientParts`."""
    examples: int
    """Number of rows of the partitioned data set; every row is in exactly one part of one client."""

    @cached_property
    def parts(self) -> ClientParts:
        """The clients' parts as flat arrays."""
        return ClientParts.from_clients(self.clients)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the clients' ids and indices: equal for the same partition, on every machine."""
        digest = hashlib.sha256(f"{_HEADER} {self.examples}".encode())
        parts = self.parts
        rows, sizes = memoryview(parts.rows.astype("<i8").tobytes()), parts.sizes.tolist()
        ends = (8 * parts.bounds[:: len(_SPLITS)]).tolist()
        for number, id in enumerate(parts.ids):
            digest.update(json.dumps([id, *sizes[number]]).encode())
            digest.update(rows[ends[number] : ends[number + 1]])
        return digest.hexdigest()

    def label_table(self, labels: Sequence[str], dataset: datasets.Dataset) -> tuple[ClientRow, ...]:
        """Return a row for each client, in order; ``counts`` follows `labels`.

        Args:
            labels: Names of the labels, as in `LoadedData`; empty for examples without classes.
        """
        if len(dataset) != self.examples:
            expected = f"the {self.examples} examples that were partitioned; this data set has {len(dataset)}"
            raise FedspanError("partition", self.fingerprint[:12], expected)
        parts, row_labels = self.parts, np.empty(0, np.int64)
        if labels:
            row_labels = get_arrow_column(dataset, "label").to_numpy()[parts.rows]
        ends = parts.bounds[:: len(_SPLITS)].tolist()
        rows = []
        for number, (id, sizes) in enumerate(zip(parts.ids, parts.sizes.tolist(), strict=True)):
            client_labels = row_labels[ends[number] : ends[number + 1]]
            counts = np.bincount(client_labels, minlength=len(labels)).tolist() if labels else []
            rows.append(ClientRow(id, tuple(counts), *sizes))
        return tuple(rows)

    def to_json(self) -> str:
        """Return the partition as JSON text, for a run's folder; `from_json` reads it back."""
        content = {
            "format": _FORMAT,
            "fingerprint": self.fingerprint,
            "examples": self.examples,
            "clients": self.parts.ids,
            **{split: self.parts.sizes[:, number].tolist() for number, split in enumerate(_SPLITS)},
            "rows": self.parts.rows.tolist(),
        }
        return json.dumps(content, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str, field: str = "partition") -> Partition:
        """Read the partition that `to_json` wrote.

        Raises:
            FedspanError: If it is no such text, or one that was changed: its fingerprint does not match.
        """
        try:
            content = json.loads(text)
            recorded = (content["format"], content["fingerprint"])
            sizes = np.array([content[split] for split in _SPLITS], np.int64).reshape(len(_SPLITS), -1)
            loaded = cls(ClientParts(content["clients"], sizes.T, content["rows"]), int(content["examples"]))
            actual = loaded.fingerprint
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise FedspanError(field, text[:60], f"a partition as fedspan writes it ({_FORMAT})") from error
        if recorded != (_FORMAT, actual):
            expected = f"a {_FORMAT} whose fingerprint is that of its clients, {actual[:12]}; this file was changed"
            raise FedspanError(field, recorded, expected)
        return loaded


def partition(
    dataset: datasets.Dataset,
    config: PartitionConfig,
    seed: int,
    field: str = "partition",
    groups: np.ndarray | None = None,
) -> Partition:
    """Partition `dataset` among clients.

    Args:
        dataset: Data set with a column ``label`` (int) for partitions by label, or ``target`` (float) for those by
            ranges (``config.bins``), and ``config.column``, if it is set.
        seed: Seed of every random draw; the same seed gives the same indices, whatever the state of any global
            generator.
        field: The user's name of `config`; the fields of all errors begin with it.
        groups: Number of each example's group, int64, (examples,), whose examples stay in one part of one client; None:
            no groups.
    """
    shares = assign(dataset, config, seed, field, groups)
    if long := next((id for id in shares.ids if len(id) > _LONGEST_ID), None):
        problem = f"a value of {len(long)} characters, {long[:40]!r} and so on, is too long for a client's id"
        raise FedspanError(
            f"{field}.column", config.column, f"values of at most {_LONGEST_ID} characters", problem=problem
        )
    labels = None
    if groups is not None and "label" in dataset.column_names:
        labels = get_arrow_column(dataset, "label").to_numpy()
    return Partition(_split(shares, config, seed, groups, labels), len(dataset))


def _split(
    shares: Shares, config: PartitionConfig, seed: int, groups: np.ndarray | None, labels: np.ndarray | None
) -> ClientParts:
    sizes = np.empty((len(shares.ids), len(_SPLITS)), np.int64)
    rows = np.empty_like(shares.rows)
    bounds = shares.bounds.tolist()
    for number, client in enumerate(shares.ids):
        start, stop = bounds[number], bounds[number + 1]
        validation, test = compute_part_sizes(stop - start, config.validation, config.test)
        rng = make_generator(seed, "split", client)
        shuffled = shares.rows[start:stop]
        if groups is not None:
            shuffled, validation, test = _split_groups(shuffled, groups, labels, validation, test, rng)
        sizes[number] = stop - start - validation - test, validation, test
        if validation + test == 0:
            rows[start:stop] = shares.rows[start:stop]
            continue
        # Keyed by the client's id, so that a natural client's split does not change when other clients join.
        shuffled = shuffled if groups is not None else rng.permutation(shuffled)
        parts = np.split(shuffled, [test, test + validation])
        rows[start:stop] = np.concatenate([np.sort(part) for part in (parts[2], parts[1], parts[0])])
    return ClientParts(shares.ids, sizes, rows)


def _split_groups(
    rows: np.ndarray,
    groups: np.ndarray,
    labels: np.ndarray | None,
    validation: int,
    test: int,
    rng: np.random.Generator,
) -> tuple[np.ndarray, int, int]:
    """Order a client's rows by part, and round the sizes of validation and test to whole groups, by label.

    Returns:
        The rows of test, validation and training, and the sizes of validation and test: of at least one group each
        where one is left for training.
    """
    parts: list[np.ndarray] = []
    for requested, still_needed in ((test, bool(validation)), (validation, False)):
        client_groups = groups[rows]
        remaining = len(np.unique(client_groups)) - 1
        part = np.empty(0, np.int64)
        if requested:
            maximum = max(1, remaining - still_needed)
            part = draw_groups(client_groups, requested, rng, None if labels is None else labels[rows], maximum=maximum)
        parts.append(rows[part])
        rows = np.delete(rows, part)
    return np.concatenate([*parts, rows]), len(parts[1]), len(parts[0])


def compute_part_sizes(count: int, validation: float, test: float) -> tuple[int, int]:
    """Return the sizes of validation and test: at least one each of three, test of two; one is left for training."""
    sizes = [int(count * validation + 0.5), int(count * test + 0.5)]
    if validation > 0 and count >= 3:
        sizes[0] = max(1, sizes[0])
    if test > 0 and count >= 2:
        sizes[1] = max(1, sizes[1])
    while sum(sizes) >= count:
        sizes[0 if sizes[0] >= sizes[1] else 1] -= 1
    return sizes[0], sizes[1]


def draw_groups(
    groups: np.ndarray,
    count: int,
    rng: np.random.Generator,
    labels: np.ndarray | None = None,
    *,
    maximum: int | None = None,
) -> np.ndarray:
    """Draw whole groups with about `count` rows together, each label in proportion; at least one group, and not all.

    Groups are visited at random, and one is drawn if that brings the labels' counts nearer, by squared distance, to
    their shares of `count`. (scikit-learn's ``StratifiedGroupKFold`` makes folds of equal sizes only.)

    Args:
        groups: Number of each row's group, int64, (rows,).
        labels: Label of each row, int64, (rows,); None: all rows count alike.
        maximum: Largest number of groups that may be drawn; None: all but one.

    Returns:
        The rows of the drawn groups, sorted; empty if there is only one group.
    """
    numbers = np.unique(groups, return_inverse=True)[1].reshape(-1)
    sizes = np.bincount(numbers)
    maximum = len(sizes) - 1 if maximum is None else maximum
    if len(sizes) < 2 or maximum < 1:
        return np.empty(0, np.int64)
    classes = np.zeros(len(groups), np.int64) if labels is None else np.unique(labels, return_inverse=True)[1]
    counts_by_group: Any = coo_array((np.ones(len(groups), np.int64), (numbers, classes.reshape(-1)))).tocsr()
    counts_by_group.sum_duplicates()
    starts: list[int] = counts_by_group.indptr.tolist()
    columns: list[int] = counts_by_group.indices.tolist()
    counts: list[int] = counts_by_group.data.tolist()
    missing: list[float] = (np.bincount(classes.reshape(-1)) * (count / len(groups))).tolist()
    order, drawn = rng.permutation(len(sizes)), list[int]()
    for group in order.tolist():
        entries = range(starts[group], starts[group + 1])
        # With h rows of a label where d are missing, the squared distance changes by h (h - 2 d).
        if sum(counts[entry] * (counts[entry] - 2 * missing[columns[entry]]) for entry in entries) < 0:
            for entry in entries:
                missing[columns[entry]] -= counts[entry]
            drawn.append(group)
            if len(drawn) == maximum:
                break
    if not drawn:  # every group is too large
        drawn.append(int(order[np.argmin(sizes[order])]))
    return np.flatnonzero(np.isin(numbers, drawn)).astype(np.int64)
