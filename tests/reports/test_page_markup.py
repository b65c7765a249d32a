"""Texts of others in a report: none is markup, neither of the page nor of Plotly's own."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason="the extra fedspan[report] is not installed")

from helpers.compared_runs import figures

from fedspan.data.partition import ClientRow
from fedspan.reports.groups import RunGroup
from fedspan.reports.page import PageContent, render_page
from fedspan.reports.run_data import read_runs

LINK = '<a href="https://example.org/">look</a>'


def test_no_text_of_others_is_a_link(series: Path) -> None:
    run = read_runs([series])[0]
    assert run.report is not None
    report = replace(run.report, by_client={LINK: {"accuracy": 0.5}, "b": {"accuracy": 0.25}})
    rows = tuple({**row, "cohort": [LINK], "failures": [{"client": LINK, "reason": LINK}]} for row in run.rows)
    group = RunGroup(LINK, (replace(run, name=LINK, report=report, rows=rows),))
    content = PageContent((LINK, [ClientRow(LINK, (1, 0), 1, 0, 0)], (LINK, "b")), (LINK, {LINK: [2.0, 1.0]}))
    page = render_page([group], content, LINK, LINK)
    before, _, after = page.partition("<script>")
    assert "<a href" not in before
    assert "<a href" not in after.rpartition("</script>")[2]
    drawn = json.dumps(figures(page))
    assert set(re.findall(r"<[^>]*>", drawn)) == {"<extra>", "</extra>"}
    assert drawn.count("&lt;a href") >= 6  # clients, participants, labels, layers, legends
