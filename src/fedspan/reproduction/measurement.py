"""Measures that a preset's claims compare besides scores and bytes, computed on a finished run."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from fedspan.core.tensors import compute_norm, split_extras, subtract
from fedspan.logs import read_lines
from fedspan.run_folder import RunFolder
from fedspan.runs import checkpoint as checkpoints
from fedspan.runs.checkpoint_format import load as load_checkpoint
from fedspan.runs.diagnose import diagnose
from fedspan.runs.report import read_report

MEASURED = frozenset({"exact_match", "alignment", "barrier", "state_step"})
_PAIRS = 3


def measure(folder: Path, names: Collection[str]) -> dict[str, float | None]:
    """Compute some of ``MEASURED``; None if a measure has no value.

    ``exact_match`` is the report's, on the held-out set, if answers were generated;
    ``alignment`` is the mean over the examined rounds of the run's second half (``evaluation.diagnostics``), or that of
    one more round (``fedspan.diagnose``) if there are none;
    ``barrier`` is that of one more round, averaged over three pairs of clients;
    ``state_step`` is how far the last round moved the server's tensors of the target layers, relative to their norm.
    """
    values: dict[str, float | None] = {}
    recorded = _list_recorded_alignments(RunFolder(folder)) if "alignment" in names else []
    if recorded:
        values["alignment"] = sum(recorded) / len(recorded)
    if "barrier" in names or ("alignment" in names and not recorded):
        diagnosis = diagnose(folder, pairs=_PAIRS if "barrier" in names else 0)
        heights = [barrier.height for barrier in diagnosis.barriers]
        values.setdefault("alignment", None if math.isnan(diagnosis.alignment) else diagnosis.alignment)
        values["barrier"] = sum(heights) / len(heights) if heights else None
    if "exact_match" in names:
        values["exact_match"] = read_report(folder).scores.get("test", {}).get("exact_match")
    if "state_step" in names:
        values["state_step"] = _compute_state_step(RunFolder(folder))
    return {name: values[name] for name in names}


def _list_recorded_alignments(run_folder: RunFolder) -> list[float]:
    """Return the alignment in the examined rounds of the second half that have a value."""
    rows = cast("Sequence[Mapping[str, Any]]", list(read_lines(run_folder.metrics)))
    alignments = [row["diagnostics"].get("alignment") for row in rows[len(rows) // 2 :] if "diagnostics" in row]
    return [float(value) for value in alignments if isinstance(value, int | float) and math.isfinite(value)]


def _compute_state_step(run_folder: RunFolder) -> float | None:
    last = load_checkpoint(checkpoints.select_checkpoint(run_folder, "last")).state
    if last.round < 2:
        return None
    before = load_checkpoint(checkpoints.select_checkpoint(run_folder, last.round - 1)).state
    old, new = (split_extras(state.tensors)[0] for state in (before, last))
    if set(old) != set(new) or any(old[name].shape != new[name].shape for name in old):
        return None
    size = compute_norm(old)
    return compute_norm(subtract(new, old)) / size if size > 0 else None
