"""Who failed how often over a whole run: from its lines of metrics, so that a run that was resumed counts alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from fedspan.federation.outcomes import Failure

__all__ = ["failures_by_client"]


def failures_by_client(
    rows: Iterable[Mapping[str, object]], last: int = 0, more: Iterable[Failure] = ()
) -> dict[str, dict[str, Any]]:
    """Failures by client, sorted.

    Args:
        rows: lines of metrics.jsonl; what in them is no failure as a run writes it is passed over.
        last: the round that was measured and exported at the run's end.
        more: failures in that.

    Returns:
        By client id ``count``, and of its last failure ``round`` and ``reason``.
    """
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        failures = row.get("failures")
        for failure in cast(list[object], failures) if isinstance(failures, list) else ():
            match failure:
                case {"client": str() as client, "reason": str() as reason}:
                    _count(found, client, row.get("round"), reason)
                case _:
                    continue
    for failure in more:
        _count(found, failure.client, last, failure.reason)
    return dict(sorted(found.items()))


def _count(found: dict[str, dict[str, Any]], client: str, round: object, reason: str) -> None:
    count = found[client]["count"] if client in found else 0
    found[client] = {"count": count + 1, "round": round, "reason": reason}
