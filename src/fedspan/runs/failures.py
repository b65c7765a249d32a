"""Failures by client over a whole run, counted from its metrics, so that a resumed run counts the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from fedspan.federation.progress import Failure


def count_failures(
    rows: Iterable[Mapping[str, object]], last: int = 0, more: Iterable[Failure] = ()
) -> dict[str, dict[str, Any]]:
    """Count the failures by client, sorted by client id.

    Args:
        rows: Lines of metrics.jsonl; entries that are not failures as a run writes them are ignored.
        last: The round that was evaluated and exported at the end of the run.
        more: Failures of that evaluation and export.

    Returns:
        By client id, ``count``, and the ``round`` and ``reason`` of its last failure.
    """
    counts_by_client: dict[str, dict[str, Any]] = {}
    for row in rows:
        failures = row.get("failures")
        for failure in cast(list[object], failures) if isinstance(failures, list) else ():
            match failure:
                case {"client": str() as client, "reason": str() as reason}:
                    _count(counts_by_client, client, row.get("round"), reason)
                case _:
                    continue
    for failure in more:
        _count(counts_by_client, failure.client, last, failure.reason)
    return dict(sorted(counts_by_client.items()))


def _count(failures: dict[str, dict[str, Any]], client: str, round: object, reason: str) -> None:
    count = failures[client]["count"] if client in failures else 0
    failures[client] = {"count": count + 1, "round": round, "reason": reason}
