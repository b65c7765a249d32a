"""The ledger of a run: all network traffic, one JSON object per message.

Lines stay in memory until the round is committed, and are then written and synced to the disk together. A checkpoint
names the end of ledger and metrics at its round, and ``checkpoint.truncate_logs`` truncates them to it on resume.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast, get_args

from fedspan.errors import FedspanError
from fedspan.federation.progress import Direction, Purpose
from fedspan.logs import JsonLines, Position, read_lines


@dataclass(frozen=True)
class TrafficCount:
    """A count of traffic.

    Args:
        payload: Size of the tensor data in the messages, in bytes.
    """

    messages: int = 0
    bytes: int = 0
    payload: int = 0

    def __add__(self, other: TrafficCount) -> TrafficCount:
        return TrafficCount(self.messages + other.messages, self.bytes + other.bytes, self.payload + other.payload)


class Totals:
    """Sums over a ledger, by direction: training traffic of the run and each round; other purposes."""

    def __init__(self) -> None:
        self._purposes: dict[tuple[Direction, Purpose], TrafficCount] = {}
        self._runs: dict[Direction, TrafficCount] = {}
        self._rounds: dict[tuple[Direction, int], TrafficCount] = {}

    def add(self, round: int, direction: Direction, tally: TrafficCount, purpose: Purpose = "train") -> None:
        """Count one message."""
        self._purposes[direction, purpose] = self.count_purpose(direction, purpose) + tally
        if purpose != "train":
            return
        self._runs[direction] = self.run(direction) + tally
        self._rounds[direction, round] = self.count_round(direction, round) + tally

    def count_purpose(self, direction: Direction, purpose: Purpose) -> TrafficCount:
        """Return the traffic for one purpose."""
        return self._purposes.get((direction, purpose), TrafficCount())

    @property
    def out_of_round(self) -> dict[str, dict[str, int]]:
        """Bytes of messages that are not for training, by purpose and direction; only purposes with messages."""
        purposes: dict[Purpose, None] = dict.fromkeys(purpose for _, purpose in self._purposes if purpose != "train")
        return {
            purpose: {"down": self.count_purpose("down", purpose).bytes, "up": self.count_purpose("up", purpose).bytes}
            for purpose in purposes
        }

    def run(self, direction: Direction) -> TrafficCount:
        """Return the training traffic of the whole run."""
        return self._runs.get(direction, TrafficCount())

    def count_round(self, direction: Direction, round: int) -> TrafficCount:
        """Return the training traffic of one round."""
        return self._rounds.get((direction, round), TrafficCount())

    @property
    def rounds(self) -> tuple[int, ...]:
        """Rounds with training traffic, ascending."""
        return tuple(sorted({round for _, round in self._rounds}))


def read_totals(path: Path) -> Totals:
    """Sum the traffic in a ledger file.

    Raises:
        FedspanError: If a line is not a ledger entry; the error names its number.
    """
    totals = Totals()
    for number, row in enumerate(read_lines(path), 1):
        match row:
            case {
                "round": int() as round,
                "client": str(),
                "direction": "down" | "up" as direction,
                "bytes": int() as size,
                "payload": int() as payload,
            } if (purpose := row.get("purpose", "train")) in get_args(Purpose):  # none in early ledgers: training only
                tally = TrafficCount(1, size, payload)
                totals.add(round, cast(Direction, direction), tally, cast(Purpose, purpose))
            case _:
                raise FedspanError(f"{path}, line {number}", row, "an entry of the ledger")
    return totals


class Ledger:
    """Records every message of a run as it is sent."""

    def __init__(self, path: Path) -> None:
        self.totals = read_totals(path)
        self._lines = JsonLines(path)

    def record(
        self, round: int, client: str, direction: Direction, size: int, payload: int, purpose: Purpose = "train"
    ) -> None:
        """Record a message.

        Args:
            size: Bytes as serialized (``len(serialization.encode(message))``).
            payload: Bytes of tensor data (``serialization.compute_payload_size(message)``).
        """
        row: dict[str, object] = {"round": round, "client": client, "direction": direction}
        self._lines.append({**row, "bytes": size, "payload": payload, "purpose": purpose})
        self.totals.add(round, direction, TrafficCount(1, size, payload), purpose)

    def commit(self) -> Position:
        """Commit the recorded lines, as ``JsonLines.commit``."""
        return self._lines.commit()

    def close(self) -> None:
        """Close the file, as ``JsonLines.close``."""
        self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
