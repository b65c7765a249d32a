"""The weighted mean of replies, their stack, a reduction under central privacy, and buffers in which replies wait.

Buffers are in memory or, beyond a budget, encoded in a temporary file.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedspan.core.tensors import Tensors
from fedspan.core.values import Client, Contribution, Message, Reduced, StackItem
from fedspan.errors import FedspanError
from fedspan.federation import serialization
from fedspan.federation.privacy import CentralPrivacy
from fedspan.files import convert_disk_errors


class Reducer:
    """Accumulates contributions in client-id order.

    A contribution that arrives before its turn waits. Those at the front of the order are folded into a float64 sum and
    released, so memory holds one contribution (plus those waiting), and the result does not depend on the order of
    arrival.
    """

    def __init__(self, cohort: Sequence[Client]) -> None:
        self._clients = {client.id: client for client in cohort}
        self._order = sorted(self._clients)
        self._waiting: dict[str, Contribution | None] = {}
        self._sums: dict[str, Tensor] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._weights: dict[str, float] = {}
        self._stacks: dict[str, Mapping[str, Tensor]] = {}
        self._position = 0

    def add(self, client_id: str, contribution: Contribution | None) -> None:
        """Add a client's contribution, or None if the client failed and its place is skipped.

        Raises:
            ValueError: If the client is not in the cohort, was added before, or its contribution cannot be reduced; it
                is then as if it had not been added.
        """
        is_known = client_id in self._clients
        if not is_known or client_id in self._waiting or client_id in self._order[: self._position]:
            raise ValueError(f"unexpected contribution of client {client_id!r}")
        self._waiting[client_id] = None if contribution is None else self._check(contribution)
        while self._position < len(self._order) and self._order[self._position] in self._waiting:
            current = self._order[self._position]
            self._fold(self._clients[current], self._waiting.pop(current))
            self._position += 1

    def _check(self, contribution: Contribution) -> Contribution:
        """Return a contribution in the form in which it waits for its turn."""
        return contribution

    def _fold(self, client: Client, contribution: Contribution | None) -> None:
        if contribution is None:
            return
        weight = client.weight if contribution.weight is None else contribution.weight
        self._weights[client.id] = weight
        for name, value in contribution.sum.items():
            addend = value.to(torch.float64) * weight
            if name in self._sums:
                self._sums[name] += addend
            else:
                self._sums[name] = addend
                self._dtypes[name] = value.dtype if value.is_floating_point() else torch.float64
        if contribution.stack:
            self._stacks[client.id] = contribution.stack

    def compute_result(self) -> Reduced:
        """Return the reduced round after every client of the cohort was added.

        Raises:
            ValueError: If a client is missing, or no client contributed with a positive weight.
        """
        sums, total = self.compute_sum(), sum(self._weights.values())
        if not total > 0:
            raise ValueError("no reply of positive weight in this round")
        return Reduced(
            mean={name: (value / total).to(self._dtypes[name]) for name, value in sums.items()},
            stack=tuple(
                StackItem(self._clients[id], self._weights[id] / total, tensors) for id, tensors in self._stacks.items()
            ),
            count=len(self._weights),
        )

    def compute_sum(self) -> Tensors:
        """Return the weighted sum of the replies, float64, after every client of the cohort was added.

        Raises:
            ValueError: If a client is missing, or the reduction sums nothing.
        """
        self._require_all()
        return self._sums

    def _require_all(self) -> None:
        if self._position < len(self._order):
            raise ValueError(f"no contribution yet of client {self._order[self._position]!r}")


class PrivateReducer:
    """A reduction whose sum is released under central privacy.

    Args:
        reducer: Sums the clipped changes of the cohort, which may be empty.
    """

    def __init__(self, reducer: Reducer, privacy: CentralPrivacy) -> None:
        self._reducer, self._privacy = reducer, privacy

    def add(self, client_id: str, contribution: Contribution | None) -> None:
        """``Reducer.add``, with the contribution's clipped change; all clients have the same weight."""
        if contribution is not None:
            contribution = Contribution(sum=self._privacy.clip_contribution(contribution), weight=1.0)
        self._reducer.add(client_id, contribution)

    def compute_result(self) -> Reduced:
        return self._privacy.release(self._reducer.compute_sum())


_IN_MEMORY = 256 << 20
"""Bytes of all replies beyond which they, or further ones, move to a file."""
_TENSOR_BYTES = 1024
"""Bytes that a tensor takes beside its numbers, generously."""
_RESERVE = 1 << 30
"""Bytes of the disk that replies leave free for everything else."""
_CURE = (
    "set the environment variable TMPDIR to a folder on a larger disk, or lower federation.clients_per_round; replies "
    "do not wait where nothing compares them (federation.clip_ratio: null, in the simulator without simulation)"
)


class ReplyBuffer:
    """Encoded replies by client.

    Args:
        in_memory: Bytes of all replies beyond which they move to a file without a name, which ends with the process.
        on_disk: Bytes that the file may have; None: the free space of the folder for temporary files when they move
            there, less 1 GiB.
    """

    def __init__(self, in_memory: int = _IN_MEMORY, on_disk: int | None = None) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=in_memory)  # noqa: SIM115
        self._places: dict[str, tuple[int, int]] = {}
        self._in_memory, self._on_disk = in_memory, on_disk

    def store(self, id: str, body: bytes) -> None:
        """Store the reply of a client; one that it sent before is no longer returned.

        Raises:
            FedspanError: If it exceeds the budget, or the disk is full.
        """
        folder = Path(tempfile.gettempdir())
        with convert_disk_errors(folder, _CURE, field="TMPDIR"):
            start = self._file.seek(0, os.SEEK_END)
            if start + len(body) > self._in_memory:
                self._require_space(start + len(body), folder)
            self._file.write(body)
        self._places[id] = start, len(body)

    def _require_space(self, size: int, folder: Path) -> None:
        if self._on_disk is None:
            self._on_disk = max(0, shutil.disk_usage(folder).free - _RESERVE)
        if size > self._on_disk:
            problem = (
                f"the replies that wait for the end of the round take {size >> 20} MiB, and their budget in "
                f"{str(folder)!r} is {self._on_disk >> 20} MiB. {_CURE[0].upper()}{_CURE[1:]}"
            )
            raise FedspanError("TMPDIR", str(folder), problem=problem)

    def load(self, id: str) -> bytes:
        """Return the reply of a client."""
        position, length = self._places[id]
        self._file.seek(position)
        return self._file.read(length)

    def close(self) -> None:
        """Free the memory or disk space of all replies."""
        self._file.close()
        self._places.clear()


class MessageBuffer:
    """Messages of replies by client.

    Args:
        in_memory: Bytes of decoded messages beyond which further ones wait in a file, encoded.
    """

    def __init__(self, in_memory: int = _IN_MEMORY) -> None:
        self._left = in_memory
        self._decoded: dict[str, tuple[Message, int]] = {}
        self._encoded = ReplyBuffer(in_memory=1)

    def store(self, id: str, message: Message, body: bytes) -> None:
        """Store the message of a client; one that it sent before is no longer returned.

        Raises:
            FedspanError: If it exceeds the budget on the disk, or the disk is full.
        """
        self.discard(id)
        size = len(body) + _TENSOR_BYTES * len(message.tensors)  # an encoded message holds the bytes of its tensors
        if size <= self._left:
            self._decoded[id] = message, size
            self._left -= size
        else:
            self._encoded.store(id, body)

    def load(self, id: str) -> Message:
        """Return the message of a client."""
        return self._decoded[id][0] if id in self._decoded else serialization.decode(self._encoded.load(id))

    def discard(self, id: str) -> None:
        """Free the memory of a client's message, if there is one; the file keeps its size."""
        if id in self._decoded:
            self._left += self._decoded.pop(id)[1]

    def close(self) -> None:
        """Free the memory and disk space of all messages."""
        self._decoded.clear()
        self._encoded.close()
