"""A data set divided among clients, and each client's examples among training, validation and test."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import datasets
import numpy as np

from fedspan.data.assign import assign
from fedspan.data.config import PartitionConfig
from fedspan.data.keyed import generator
from fedspan.data.names import arrow_column
from fedspan.errors import FedspanError

__all__ = ["ClientPart", "ClientRow", "Partition", "partition"]

_FORMAT = "fedspan-partition-1"
_SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, eq=False)
class ClientPart:
    """One client's examples: read-only, sorted int64 row indices into the divided data set, disjoint.

    Attributes:
        id: ``client-00`` and so on, or the value of the natural column (any text, not always fit for a file name).
        train: never empty.
        validation: for choosing settings; may be empty.
        test: for the client's own (personalised) accuracy; may be empty.
    """

    id: str
    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray

    def __post_init__(self) -> None:
        for split in _SPLITS:
            indices = np.array(getattr(self, split), dtype=np.int64)
            indices.setflags(write=False)
            object.__setattr__(self, split, indices)

    @property
    def indices(self) -> np.ndarray:
        """All of the client's row indices, sorted."""
        return np.sort(np.concatenate([self.train, self.validation, self.test]))


@dataclass(frozen=True)
class ClientRow:
    """One client's line in a table: how many examples of each label (all parts together), and how many in each part."""

    id: str
    counts: tuple[int, ...]
    train: int
    validation: int
    test: int


@dataclass(frozen=True, eq=False)
class Partition:
    """Who holds which examples.

    Attributes:
        clients: numbered clients in order of their numbers, natural ones sorted by value.
        examples: the number of rows of the divided data set; every row is in exactly one part of one client.
    """

    clients: tuple[ClientPart, ...]
    examples: int

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the clients' ids and indices: equal for the same division, on every machine."""
        digest = hashlib.sha256(f"{_FORMAT} {self.examples}".encode())
        for client in self.clients:
            parts = [getattr(client, split) for split in _SPLITS]
            digest.update(json.dumps([client.id, *(len(part) for part in parts)]).encode())
            for part in parts:
                digest.update(part.astype("<i8").tobytes())
        return digest.hexdigest()

    def label_table(self, labels: Sequence[str], dataset: datasets.Dataset) -> tuple[ClientRow, ...]:
        """A row for each client, in order; ``counts`` follows `labels`.

        Args:
            labels: the names of the labels, as in `LoadedData`; none for examples without classes.
            dataset: the data set that was divided.

        Raises:
            FedspanError: `dataset` has another number of rows, so it is not the one that was divided.
        """
        if len(dataset) != self.examples:
            expected = f"the {self.examples} examples that were divided; this data set has {len(dataset)}"
            raise FedspanError("partition", self.fingerprint[:12], expected)
        held = arrow_column(dataset, "label").to_numpy() if labels else np.empty(0, np.int64)
        rows = []
        for client in self.clients:
            counts = np.bincount(held[client.indices], minlength=len(labels)).tolist() if labels else []
            sizes = [len(getattr(client, split)) for split in _SPLITS]
            rows.append(ClientRow(client.id, tuple(counts), *sizes))
        return tuple(rows)

    def to_json(self) -> str:
        """The partition as JSON text, for a run's folder; `from_json` reads it back."""
        clients = [
            {"id": client.id, **{split: getattr(client, split).tolist() for split in _SPLITS}}
            for client in self.clients
        ]
        content = {"format": _FORMAT, "fingerprint": self.fingerprint, "examples": self.examples, "clients": clients}
        return json.dumps(content, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str, field: str = "partition") -> Partition:
        """The partition that `to_json` wrote.

        Raises:
            FedspanError: not such a text, or one that was changed: its fingerprint does not fit.
        """
        try:
            content = json.loads(text)
            clients = tuple(ClientPart(c["id"], *(c[split] for split in _SPLITS)) for c in content["clients"])
            read = cls(clients, int(content["examples"]))
            written = (content["format"], content["fingerprint"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise FedspanError(field, text[:60], f"a partition as fedspan writes it ({_FORMAT})") from error
        if written != (_FORMAT, read.fingerprint):
            expected = (
                f"a {_FORMAT} whose fingerprint is that of its clients, {read.fingerprint[:12]}; this file was changed"
            )
            raise FedspanError(field, written, expected)
        return read


def partition(dataset: datasets.Dataset, config: PartitionConfig, seed: int, field: str = "partition") -> Partition:
    """Divide `dataset` among clients.

    Args:
        dataset: with a column ``label`` (int) for divisions by label, and ``config.column`` for a natural partition.
        config: how.
        seed: the same seed gives the same indices, whatever the state of any global generator.
        field: what the user calls `config`; it opens the field of every error.

    Raises:
        FedspanError: the data cannot be divided as asked; the error names the client and the option to change.
    """
    shares = assign(dataset, config, seed, field)
    return Partition(tuple(_split(client, rows, config, seed) for client, rows in shares.items()), len(dataset))


def _split(client: str, rows: np.ndarray, config: PartitionConfig, seed: int) -> ClientPart:
    validation, test = _part_sizes(len(rows), config.validation, config.test)
    # Keyed by the client's id, so that a natural client's split does not change when other clients join.
    mixed = generator(seed, "split", client).permutation(rows)
    parts = np.split(mixed, [test, test + validation])
    return ClientPart(client, train=np.sort(parts[2]), validation=np.sort(parts[1]), test=np.sort(parts[0]))


def _part_sizes(count: int, validation: float, test: float) -> tuple[int, int]:
    """How many examples validation and test get: at least one each of three, test of two; one is left for training."""
    sizes = [int(count * validation + 0.5), int(count * test + 0.5)]
    if validation > 0 and count >= 3:
        sizes[0] = max(1, sizes[0])
    if test > 0 and count >= 2:
        sizes[1] = max(1, sizes[1])
    while sum(sizes) >= count:
        sizes[0 if sizes[0] >= sizes[1] else 1] -= 1
    return sizes[0], sizes[1]
