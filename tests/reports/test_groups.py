"""Groups of runs in a table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason="the extra fedspan[report] is not installed")

from fedspan.reports.groups import group_runs
from fedspan.reports.page import PageContent, render_page
from fedspan.reports.run_data import read_runs


def test_the_table_tells_held_out_scores_from_those_of_the_clients_own_tests(series: Path) -> None:
    (run,) = read_runs([series / "fedit-seed0"])
    assert run.report is not None
    worst = {"client": "north", "accuracy": 0.5}
    both = {"test": {"accuracy": 0.6}, "clients": {"accuracy": 0.8, "worst": worst}}
    for parts, heads, cells in (
        (
            ("test", "clients"),
            ("held-out accuracy", "accuracy on the clients&#x27; own tests", "worst client there"),
            ("60.0 %", "80.0 %", "50.0 % (north)"),
        ),
        (("clients",), ("accuracy on the clients&#x27; own tests", "worst client there"), ("80.0 %", "50.0 % (north)")),
        (("test",), ("held-out accuracy",), ("60.0 %",)),
    ):
        changed = replace(run, report=replace(run.report, scores={part: both[part] for part in parts}), rows=())
        text = render_page(group_runs([changed]), PageContent(), "title", "version")
        head = "".join(f"<th>{name}</th>" for name in ("run", "seed", *heads, "best round"))
        assert head in text
        assert f"<td>0</td>{''.join(f'<td>{cell}</td>' for cell in cells)}" in text
