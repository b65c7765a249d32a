"""The logs of a run: the ledger (what crossed the network) and the metrics, one JSON object per line.

Lines are kept in memory until the round is committed, then written and brought to the disk together; a checkpoint names
the length that the files had at its round, and ``checkpoint.truncate_logs`` cuts them there on resume.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, cast, get_args

from fedspan.errors import FedspanError
from fedspan.files import disk_errors, from_json, fsync_folder, read_bytes, to_json, write_all

__all__ = ["Direction", "JsonLines", "Ledger", "Purpose", "Tally", "Totals", "read_lines", "read_totals"]

Direction = Literal["down", "up"]
"""From server to client, or from client to server."""

Purpose = Literal["train", "evaluate", "export"]
"""What a message is for. Ledgers of before there were any hold messages of the training alone."""


class JsonLines:
    """A file of JSON lines that is only appended to; the metrics are one. NaN and infinities: ``files.to_json``.

    Args:
        path: the file; made if there is none. After an interruption, cut it first (``checkpoint.resume``).

    Raises:
        FedspanError: if it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending: list[str] = []
        with disk_errors(path.parent):
            new = not path.exists()
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
            self._descriptor = os.open(path, flags, 0o644)
            self._position = os.fstat(self._descriptor).st_size
            if new:
                fsync_folder(path.parent)

    def append(self, row: Mapping[str, object]) -> None:
        """Add a line. It reaches the file at the next ``commit``.

        Raises:
            TypeError: for a value that JSON has no form for, such as a tensor.
        """
        self._pending.append(to_json(row) + "\n")

    def commit(self) -> int:
        """Write the lines since the last commit, wait until they are on the disk, and return the file's length.

        Raises:
            FedspanError: if the disk is full or refuses; the file then ends where it did before.
        """
        data = "".join(self._pending).encode()
        with disk_errors(self._path.parent):
            try:
                write_all(self._descriptor, data)
                os.fsync(self._descriptor)
            except OSError:
                with suppress(OSError):  # so that a second try adds no line twice
                    os.ftruncate(self._descriptor, self._position)
                raise
        self._pending.clear()
        self._position += len(data)
        return self._position

    def close(self) -> None:
        """Close the file; lines that were not committed belong to an unfinished round and are dropped."""
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_lines(path: Path) -> Iterator[dict[str, object]]:
    """The rows of a file of JSON lines, of a finished run or of one at work; none if there is no file.

    A last line without its end is passed over: its round was being committed.

    Raises:
        FedspanError: for a line that is not a JSON object in UTF-8, with its number.
    """
    data = read_bytes(path) if path.exists() else b""
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            row = from_json(line)
        except ValueError as error:
            raise FedspanError(f"{path}, line {number}", line, "a JSON object is expected here") from error
        if not isinstance(row, dict):
            raise FedspanError(f"{path}, line {number}", line, "a JSON object is expected here")
        yield row


@dataclass(frozen=True)
class Tally:
    """A count of traffic.

    Args:
        messages: how many messages.
        bytes: their size as sent.
        payload: the tensor data in them, in bytes.
    """

    messages: int = 0
    bytes: int = 0
    payload: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.messages + other.messages, self.bytes + other.bytes, self.payload + other.payload)


class Totals:
    """Sums over a ledger, by direction: of the run's training, of each round's, of each client's; and of the rest."""

    def __init__(self) -> None:
        self._purposes: dict[tuple[Direction, Purpose], Tally] = {}
        self._runs: dict[Direction, Tally] = {}
        self._rounds: dict[tuple[Direction, int], Tally] = {}
        self._clients: dict[tuple[Direction, str], Tally] = {}

    def add(self, round: int, client: str, direction: Direction, tally: Tally, purpose: Purpose = "train") -> None:
        """Count one message."""
        self._purposes[direction, purpose] = self.purpose(direction, purpose) + tally
        if purpose != "train":
            return
        self._runs[direction] = self.run(direction) + tally
        self._rounds[direction, round] = self.round(direction, round) + tally
        self._clients[direction, client] = self.client(direction, client) + tally

    def purpose(self, direction: Direction, purpose: Purpose) -> Tally:
        """All that was for one purpose."""
        return self._purposes.get((direction, purpose), Tally())

    @property
    def beside(self) -> dict[str, dict[str, int]]:
        """Bytes by purpose and direction of what was not for training, as far as there was any."""
        others: dict[Purpose, None] = dict.fromkeys(purpose for _, purpose in self._purposes if purpose != "train")
        return {
            purpose: {"down": self.purpose("down", purpose).bytes, "up": self.purpose("up", purpose).bytes}
            for purpose in others
        }

    def run(self, direction: Direction) -> Tally:
        """The whole run."""
        return self._runs.get(direction, Tally())

    def round(self, direction: Direction, round: int) -> Tally:
        """One round."""
        return self._rounds.get((direction, round), Tally())

    def client(self, direction: Direction, client: str) -> Tally:
        """One client."""
        return self._clients.get((direction, client), Tally())

    @property
    def rounds(self) -> tuple[int, ...]:
        """Rounds with traffic, ascending."""
        return tuple(sorted({round for _, round in self._rounds}))

    @property
    def clients(self) -> tuple[str, ...]:
        """Clients with traffic, sorted."""
        return tuple(sorted({client for _, client in self._clients}))


def read_totals(path: Path) -> Totals:
    """The sums over a ledger's file.

    Raises:
        FedspanError: for a line that is no entry of a ledger, with its number.
    """
    totals = Totals()
    for number, row in enumerate(read_lines(path), 1):
        match row:
            case {
                "round": int() as round,
                "client": str() as client,
                "direction": "down" | "up" as direction,
                "bytes": int() as size,
                "payload": int() as payload,
            } if (purpose := row.get("purpose", "train")) in get_args(Purpose):
                tally = Tally(1, size, payload)
                totals.add(round, client, cast(Direction, direction), tally, cast(Purpose, purpose))
            case _:
                raise FedspanError(f"{path}, line {number}", row, "an entry of the ledger is expected here")
    return totals


class Ledger:
    """Every message of a run, counted as it is sent.

    Args:
        path: ledger.jsonl; what it holds already is counted first.

    Raises:
        FedspanError: if the file is damaged or cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.totals = read_totals(path)
        self._lines = JsonLines(path)

    def record(
        self, round: int, client: str, direction: Direction, size: int, payload: int, purpose: Purpose = "train"
    ) -> None:
        """Count a message.

        Args:
            round: the round that it belongs to.
            client: the client's id.
            direction: ``down`` or ``up``.
            size: bytes as serialised (``len(wire.encode(message))``).
            payload: bytes of tensor data (``wire.payload_size(message)``).
            purpose: what it is for.
        """
        row: dict[str, object] = {"round": round, "client": client, "direction": direction}
        self._lines.append({**row, "bytes": size, "payload": payload, "purpose": purpose})
        self.totals.add(round, client, direction, Tally(1, size, payload), purpose)

    def commit(self) -> int:
        """As ``JsonLines.commit``."""
        return self._lines.commit()

    def close(self) -> None:
        """As ``JsonLines.close``."""
        self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
