"""Runs as a report compares them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from fedspan.reports.run_data import RunData


def figures(text: str) -> list[dict[str, Any]]:
    """The figures of a page, as their JSON in it."""
    found = re.search(r"const figures = (\[.*?\]);\n\n", text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def compare_run(run: RunData, test: float, *, start: float, local: float, centralized: float) -> RunData:
    """A run with these scores on held-out examples, whose best round was the last of three."""
    assert run.report is not None
    scores = {name: {"test": {"accuracy": value}} for name, value in (("local", local), ("centralized", centralized))}
    baselines = {name: {"scores": score, "by_client": {"north": score["test"]}} for name, score in scores.items()}
    final = {"test": {"accuracy": test}}
    report = replace(run.report, scores=final, best_round=3, baselines=baselines, selected=True)
    return replace(run, report=report, rows=({"round": 0, "test": {"accuracy": start}}, *run.rows))


def body(text: str) -> str:
    """Without plotly's own script."""
    return re.sub(r"<script>(?!\nconst figures).*?</script>", "", text, flags=re.DOTALL)
