"""Verdicts on a preset's numbers: direction, gaps, levels, bytes, and what cannot be judged."""

from __future__ import annotations

from typing import Any

import pytest

from fedspan.runs.cells import Cell
from fedspan.runs.judging import CellScore, Judged, judge, verdict_table
from fedspan.runs.presets import Claim

CELLS = (Cell("iid", {"split": "IID"}, {}), Cell("skewed", {"split": "skewed"}, {}))


def score(cell: str, method: str, *scores: float, **more: Any) -> CellScore:
    values: dict[str, Any] = {"metric": "accuracy", "higher": True, "bytes_up": 100.0, "bytes_down": 100.0, **more}
    mean = sum(scores) / len(scores) if scores else None
    return CellScore(cell, method, {}, scores=scores, mean=mean, deviation=None, seconds=1.0, **values)


SCORES = (
    score("iid", "A", 0.90, 0.91, 0.92, bytes_up=50.0),
    score("skewed", "A", 0.85, 0.86, 0.87),
    score("iid", "B", 0.89, 0.90, 0.91),
    score("skewed", "B", 0.70, 0.72, 0.74),
)


def judged(**claim: Any) -> Judged:
    (found,) = judge(
        [Claim.model_validate({"says": "A is better", "better": "A", "worse": ["B"], **claim})], CELLS, SCORES
    )
    return found


@pytest.mark.parametrize(
    ("claim", "verdict", "cells"),
    [
        ({}, "holds", 2),
        ({"better": "B", "worse": ["A"]}, "contradicted", 2),
        ({"cells": {"split": ["IID"]}}, "holds", 1),
        ({"gap": {"axis": "split", "before": "IID", "after": "skewed"}}, "holds", 1),
        ({"within": 0.02, "cells": {"split": ["IID"]}}, "holds", 1),
        ({"within": 0.02, "cells": {"split": ["skewed"]}}, "contradicted", 1),
        ({"measure": "bytes_up", "cells": {"split": ["IID"]}}, "holds", 1),
        ({"measure": "bytes_down"}, "inconclusive", 2),
        ({"needs": "a look inside"}, "not runnable here", 0),
    ],
)
def test_verdicts(claim: dict[str, Any], verdict: str, cells: int) -> None:
    found = judged(**claim)
    assert (found.verdict, len(found.cells)) == (verdict, cells)
    assert (found.why is None) == (verdict != "not runnable here")


def test_less_of_a_loss_is_better_and_a_row_that_failed_leaves_its_cell_out() -> None:
    scores = (
        score("iid", "A", 1.0, 1.1, 1.2, metric="loss", higher=False),
        score("iid", "B", 2.0, 2.2, 2.1, metric="loss", higher=False),
        score("skewed", "A", metric=""),
        score("skewed", "B", 2.0, 2.2, 2.1, metric="loss", higher=False),
    )
    (found,) = judge([Claim(says="s", better="A", worse=["B"])], CELLS, scores)
    assert (found.verdict, [cell.cell for cell in found.cells]) == ("holds", ["iid"])
    (none,) = judge([Claim(says="s", better="A", worse=["B"], cells={"split": ["skewed"]})], CELLS, scores)
    assert none.why is not None
    table = verdict_table([found, none])
    assert [row[1] for row in table.rows] == ["A over B"] * 2
    assert table.rows[0][2].startswith("+1.0")
