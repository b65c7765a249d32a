"""Clients that a round does not wait for, because their last replies did not count."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping


class Absences:
    """In how many of its last rounds a client's reply did not count, from the rounds' draws alone.

    It is not stored: a resumed run draws the rounds before it again.

    Args:
        cohort: Returns the clients that are selected in a round.
    """

    def __init__(self, cohort: Callable[[int], Iterable[str]]) -> None:
        self._cohort = cohort
        self._rounds: defaultdict[str, list[int]] = defaultdict(list)
        self._drawn = 0

    def find(
        self, round: int, ids: Iterable[str], last_replies: Mapping[str, int], limit: int | None
    ) -> frozenset[str]:
        """Return the clients that a round does not wait for.

        A client is waited for until its reply did not count in ``limit`` rounds in a row, and again after twice, four
        times, eight times as many: one that is back, but slower than all others, is noticed then.

        Args:
            last_replies: Round of the last accepted reply of each client, whether it still stores that round's state or
                lost it.
            limit: Number of rounds; None: every client is waited for.
        """
        if limit is None:
            return frozenset()
        for number in range(self._drawn, round):
            for id in self._cohort(number):
                self._rounds[id].append(number)
        self._drawn = max(self._drawn, round)
        missed = {id: self._count(id, last_replies.get(id, -1), round) for id in ids}
        absent = frozenset(id for id, count in missed.items() if _is_absent(count, limit))
        return absent if len(absent) < len(missed) else frozenset()

    def _count(self, id: str, after: int, before: int) -> int:
        """Return in how many rounds between two a client was selected."""
        rounds = self._rounds[id]
        return bisect_left(rounds, before) - bisect_right(rounds, after)


class EvaluationAbsences:
    """The clients that evaluations beside asynchronous rounds do not wait for."""

    def __init__(self) -> None:
        self._missed = Counter[str]()

    def find(self, ids: Collection[str], stalled: Collection[str], limit: int | None) -> frozenset[str]:
        """Return the clients that an evaluation does not wait for; none if it would be all.

        Args:
            limit: Number of evaluations that a client missed in a row, from which on it is not waited for (as in
                ``Absences``); None: any.
        """
        absent = frozenset(
            id for id in ids if id in stalled or (limit is not None and _is_absent(self._missed[id], limit))
        )
        return absent if len(absent) < len(ids) else frozenset()

    def record(self, ids: Collection[str], measured: Collection[str]) -> None:
        """Record which of the clients of an evaluation were measured."""
        for id in ids:
            self._missed[id] = 0 if id in measured else self._missed[id] + 1


class Awaited:
    """The clients that an exchange waits for.

    Args:
        absent: Clients among them that are not waited for if the others suffice.
    """

    def __init__(self, ids: Iterable[str], absent: Collection[str]) -> None:
        all_clients = set(ids)
        self._pending = all_clients - set(absent)
        self._is_everyone = len(self._pending) == len(all_clients)

    def is_over(self, id: str, accepted: Callable[[], Collection[str]], quorum: int) -> bool:
        """Record that a client replied or failed, and return whether the absent ones need not be waited for."""
        self._pending.discard(id)
        return not self._is_everyone and not self._pending and len(accepted()) >= quorum


def _is_absent(missed: int, limit: int) -> bool:
    """Return whether a client is not awaited: it missed ``limit`` rounds or more, but not 2, 4, 8, ... times those."""
    times, rest = divmod(missed, limit)
    is_due = rest == 0 and times > 1 and times & (times - 1) == 0
    return missed >= limit and not is_due
