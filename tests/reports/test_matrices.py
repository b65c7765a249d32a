"""Matrix figures: what is drawn for each client, label, round and layer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

matrices = pytest.importorskip("fedspan.reports.matrices", reason="the extra fedspan[report] is not installed")
partition_module = pytest.importorskip("fedspan.data.partition")
measures = pytest.importorskip("fedspan.diagnostics.measures")


def run(*rows: dict[str, Any]) -> Any:
    return SimpleNamespace(name="first", folder=Path("first"), rows=rows)


def test_labels_are_drawn_as_shares_with_their_numbers() -> None:
    rows = [partition_module.ClientRow("east", (3, 1), 3, 1, 0), partition_module.ClientRow("west", (0, 0), 0, 0, 0)]
    (heatmap,) = matrices.partition(rows, ["a", "b"]).data
    assert [list(line) for line in heatmap.z] == [[0.75, 0.25], [0.0, 0.0]]
    assert (list(heatmap.x), list(heatmap.y)) == (["a", "b"], ["east", "west"])
    assert [list(line) for line in heatmap.text] == [["3", "1"], ["0", "0"]]


def test_many_labels_have_no_numbers_in_their_cells() -> None:
    rows = [partition_module.ClientRow("east", (1,) * 13, 13, 0, 0)]
    (heatmap,) = matrices.partition(rows, [f"label {number}" for number in range(13)]).data
    assert set(heatmap.text[0]) == {""}


def test_who_took_part_and_who_failed_is_drawn_by_round() -> None:
    """The measured start is no round; a failure is drawn over the participation."""
    found = run(
        {"round": 0, "cohort": []},
        {"round": 1, "cohort": ["west", "east"], "failures": [{"client": "west", "reason": "late"}]},
        {"round": 2, "cohort": ["west"], "failures": [{"client": "north"}, "damaged", {}]},
    )
    (heatmap,) = matrices.draw_participation(found).data
    assert (list(heatmap.x), list(heatmap.y)) == ([1, 2], ["east", "north", "west"])
    assert [list(line) for line in heatmap.z] == [[1.0, 0.0], [0.0, 0.5], [0.5, 1.0]]
    assert [list(line) for line in heatmap.text] == [["", ""], ["", "x"], ["x", ""]]


def test_diagnostics_are_drawn_by_layer_with_a_menu_of_those_that_have_values() -> None:
    first, second, *_ = measures.MEASURES
    layers = [{"fc1": {first.key: 0.5}}, {"fc1": {first.key: 0.25}, "fc2": {second.key: 2.0}}]
    rows = [{"round": 2 * number, "diagnostics": {"layers": one}} for number, one in enumerate(layers, start=1)]
    figure = matrices.draw_rounds(run({"round": 1}, *rows))
    assert [[list(line) for line in heatmap.z] for heatmap in figure.data] == [
        [[0.5, 0.25], [None, None]],
        [[None, None], [None, 2.0]],
    ]
    assert [heatmap.visible for heatmap in figure.data] == [True, False]
    (menu,) = figure.layout.updatemenus
    assert [button.label for button in menu.buttons] == [first.title, second.title]
    assert [list(button.args[0]["visible"]) for button in menu.buttons] == [[True, False], [False, True]]
    assert matrices.draw_rounds(run({"round": 1})) is None
