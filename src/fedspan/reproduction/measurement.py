"""Measures that a preset's claims compare besides scores and bytes, computed on a finished run."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from fedspan.core.tensors import norm, split_extras, subtract
from fedspan.logs import read_lines
from fedspan.runs import checkpoint as checkpoints
from fedspan.runs.diagnose import diagnose
from fedspan.runs.folder import RunFolder
from fedspan.runs.session import read_report

__all__ = ["MEASURED", "measure"]

MEASURED = frozenset({"exact_match", "alignment", "barrier", "state_step"})
_PAIRS = 3


def measure(folder: Path, wanted: Collection[str]) -> dict[str, float | None]:
    """Compute some of ``MEASURED``; None if a measure has no value.

    ``exact_match`` is the report's, on the held-out set, if answers were generated;
    ``alignment`` is the mean over the examined rounds of the run's second half (``evaluation.diagnostics``), or that of
    one more round (``fedspan.diagnose``) if there are none;
    ``barrier`` is that of one more round, averaged over three pairs of clients;
    ``state_step`` is how far the last round moved the server's tensors of the target layers, relative to their norm.

    Args:
        folder: Folder of a run.
        wanted: Names of the measures.
    """
    found: dict[str, float | None] = {}
    seen_before = _looked_at(RunFolder(folder)) if "alignment" in wanted else []
    if seen_before:
        found["alignment"] = sum(seen_before) / len(seen_before)
    if "barrier" in wanted or ("alignment" in wanted and not seen_before):
        seen = diagnose(folder, pairs=_PAIRS if "barrier" in wanted else 0)
        heights = [one.height for one in seen.barriers]
        found.setdefault("alignment", None if math.isnan(seen.alignment) else seen.alignment)
        found["barrier"] = sum(heights) / len(heights) if heights else None
    if "exact_match" in wanted:
        found["exact_match"] = read_report(folder).scores.get("test", {}).get("exact_match")
    if "state_step" in wanted:
        found["state_step"] = _state_step(RunFolder(folder))
    return {name: found[name] for name in wanted}


def _looked_at(place: RunFolder) -> list[float]:
    """Return the alignment in the examined rounds of the second half that have a value."""
    rows = cast("Sequence[Mapping[str, Any]]", list(read_lines(place.metrics)))
    found = [row["diagnostics"].get("alignment") for row in rows[len(rows) // 2 :] if "diagnostics" in row]
    return [float(value) for value in found if isinstance(value, int | float) and math.isfinite(value)]


def _state_step(place: RunFolder) -> float | None:
    last = checkpoints.load(checkpoints.select_checkpoint(place, "last")).state
    if last.round < 2:
        return None
    before = checkpoints.load(checkpoints.select_checkpoint(place, last.round - 1)).state
    one, other = (split_extras(state.tensors)[0] for state in (before, last))
    if set(one) != set(other) or any(one[name].shape != other[name].shape for name in one):
        return None
    size = norm(one)
    return norm(subtract(other, one)) / size if size > 0 else None
