"""The rounds in which each client is present: clients may join late or leave before the last round.

A client that is not present in a round is not selected, not evaluated and not counted. One that joins late starts as a
client that was never selected before: it is sent the complete state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from fedspan.errors import FedspanError

Span = tuple[int, int | None]
"""The first round of a client, from 0, and the first one after its last round; None: it stays until the end."""


@dataclass(frozen=True)
class Presence:
    """The rounds in which clients are present."""

    spans: Mapping[str, tuple[Span, ...]] = field(default_factory=dict)
    """The spans of clients, in order; other clients are present in every round."""

    def is_present(self, id: str, round: int) -> bool:
        """Return whether a client is present in a round, from 0."""
        spans = self.spans.get(id)
        return spans is None or any(first <= round and (end is None or round < end) for first, end in spans)

    def select_present(self, ids: Iterable[str], round: int) -> list[str]:
        """Return the clients among ``ids`` that are present in a round, from 0, in their order."""
        if not self.spans:
            return list(ids)
        return [id for id in ids if self.is_present(id, round)]

    def change(self, round: int, joined: Collection[str], left: Collection[str]) -> Presence:
        """Return the same with clients that are present from a round on, and others that no longer are.

        Args:
            joined: Clients that are present from the round on, and were not before.
            left: Clients that were present before, and are not from the round on.
        """
        spans = dict(self.spans)
        for id in joined:
            spans[id] = (*spans.get(id, ()), (round, None))
        for id in left:
            *before, last = spans.get(id, ((0, None),))
            spans[id] = (*before, (last[0], round))
        return Presence(spans)

    def list_changes(self, round: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the clients that are present in a round and were not in the one before, and the reverse, sorted.

        Args:
            round: Number of the round, from 0; before the first one every client was as it is in it.
        """
        joined, left = list[str](), list[str]()
        for id in sorted(self.spans) if round else ():
            before, now = self.is_present(id, round - 1), self.is_present(id, round)
            if before != now:
                (joined if now else left).append(id)
        return tuple(joined), tuple(left)

    def require_enough(
        self, clients: int, round: int, least: int | None, reason: str = "federation.min_replies"
    ) -> None:
        """Check that enough clients are present in a round.

        Args:
            least: Number of clients that a round needs; None: one.
        """
        count, required = clients - sum(not self.is_present(id, round) for id in self.spans), max(1, least or 1)
        if self.spans and count < required:
            expected = f"at least {required}" + ("" if least is None else f" ({reason})")
            problem = f"{count} of {clients} clients are present in round {round + 1}"
            raise FedspanError("clients", count, expected, problem=problem)
