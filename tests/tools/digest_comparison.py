"""The comparison of two records of ``digests.py``, with what the steps of ``digests.yaml`` between them intend."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

__all__ = ["compare", "count_compared", "read_steps"]


def read_steps(names: Iterable[str]) -> list[Mapping[str, Any]]:
    """Read the named steps of ``digests.yaml``."""
    listed = yaml.safe_load(Path(__file__).with_name("digests.yaml").read_text())
    return [listed[name] for name in names]


def compare(
    before: Mapping[str, Any], after: Mapping[str, Any], steps: Sequence[Mapping[str, Any]] = ()
) -> Iterator[str]:
    """Differences between two records, but for those that steps between them intend, one line each.

    Args:
        before: The earlier record.
        after: The later record.
        steps: Steps of ``digests.yaml`` that are between the two, the earliest first.
    """
    for host in sorted({*before, *after}):
        earlier, later = before.get(host, {}), after.get(host, {})
        for case in sorted({*earlier, *later}):
            expected, found = earlier.get(case), later.get(case)
            if _is_new(host, case, expected, found, steps):
                continue
            for step in steps:
                expected = _expect(case, expected, step)
            for path, left, right in _list_differences(expected, found):
                if not any(_is_intended(host, case, path, left, step) for step in steps):
                    yield f"{host} {case} {path}: {_shorten(left)} -> {_shorten(right)}"


def count_compared(before: Mapping[str, Any], after: Mapping[str, Any]) -> int:
    """Count the cases that both records hold as recorded, not as refused, each host's by itself."""
    pairs = [(cases.get(case), found) for host, cases in before.items() for case, found in after.get(host, {}).items()]
    return sum(one is not None and "refused" not in one and "refused" not in other for one, other in pairs)


def _is_new(host: str, case: str, left: Any, right: Any, steps: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a case is recorded only after a step that lists it as new; before, it was unknown or refused."""
    if (left is not None and "refused" not in left) or right is None or "refused" in right:
        return False
    return any(_is_of(one, host, case) for step in steps for one in step.get("new") or ())


def _is_intended(host: str, case: str, path: str, left: Any, step: Mapping[str, Any]) -> bool:
    """Whether a step lists a place as added, which the earlier record lacks, or as changed in that case."""
    places = [where for one in step.get("changed") or () if _is_of(one, host, case) for where in one["where"]]
    if left is None:
        places += step.get("added") or ()
    return any(re.search(where, path) for where in places)


def _is_of(listed: Mapping[str, str], host: str, case: str) -> bool:
    """Whether something listed is of a host, by default of all, and of a case."""
    return bool(re.search(listed.get("hosts", ""), host) and re.search(listed["cases"], case))


def _expect(case: str, value: Any, step: Mapping[str, Any]) -> Any:
    """What an earlier record should be after a step: fields renamed, and the bytes of the listed fields counted."""
    value = _rename_fields(value, step.get("renamed") or {})
    fields = [one for one in step.get("fields") or () if case in one["cases"]]
    if not fields or value is None or "ledger.jsonl" not in value:
        return value
    rows = [
        (row, sum(one["bytes"] for one in fields if _is_among(row, one["messages"]))) for row in value["ledger.jsonl"]
    ]
    ledger = [{**row, "bytes": row["bytes"] + more} for row, more in rows]
    metrics = [
        {**line, "bytes": _add_bytes(line["bytes"], rows, {"purpose": "train"}, line["round"])}
        for line in value["metrics.jsonl"]
    ]
    report = value["report.json"]
    report = {
        **report,
        "bytes": _add_bytes(report["bytes"], rows, {"purpose": "train"}),
        "other_bytes": {
            purpose: _add_bytes(counts, rows, {"purpose": purpose}) for purpose, counts in report["other_bytes"].items()
        },
    }
    return {**value, "ledger.jsonl": ledger, "metrics.jsonl": metrics, "report.json": report}


def _add_bytes(
    counts: Mapping[str, int],
    rows: Sequence[tuple[Mapping[str, Any], int]],
    messages: Mapping[str, Any],
    last: float = math.inf,
) -> dict[str, int]:
    """Totals by direction with the bytes that are listed for messages up to a round."""
    return {
        direction: count
        + sum(
            more for row, more in rows if row["round"] <= last and _is_among(row, {**messages, "direction": direction})
        )
        for direction, count in counts.items()
    }


def _is_among(row: Mapping[str, Any], messages: Mapping[str, Any]) -> bool:
    """Whether a row of a ledger has the given values; of a list, one of them."""
    return all(row[key] in (wanted if isinstance(wanted, list) else [wanted]) for key, wanted in messages.items())


def _rename_fields(value: Any, renamed: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {renamed.get(key, key): _rename_fields(one, renamed) for key, one in value.items()}
    return [_rename_fields(one, renamed) for one in value] if isinstance(value, list) else value


def _list_differences(one: Any, other: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in {**one, **other}:
            yield from _list_differences(one.get(key), other.get(key), f"{path}/{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from _list_differences(left, right, f"{path}[{number}]")
    elif one != other and not (one != one and other != other):
        yield path, one, other


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 120 else f"{text[:117]}..."
