"""Verdicts on a preset's numbers, the measures behind them, and the tables: direction, gaps, levels, bytes."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedspan.experiments.tables import Table
from fedspan.logs import JsonLines
from fedspan.reports.curves import Point, compute_target, find_target_round
from fedspan.reproduction import reproduce
from fedspan.reproduction.cells import Cell
from fedspan.reproduction.presets import Claim
from fedspan.reproduction.reproduce import Reproduction, measure
from fedspan.reproduction.verdicts import CellScore, Judged, JudgedCell, format_difference, judge, tabulate_verdicts
from fedspan.run_folder import RunFolder

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
        [Claim.model_validate({"statement": "A is better", "better": "A", "worse": ["B"], **claim})], CELLS, SCORES
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
    assert (found.reason is None) == (verdict != "not runnable here")


def test_less_of_a_loss_is_better_and_a_row_that_failed_leaves_its_cell_out() -> None:
    scores = (
        score("iid", "A", 1.0, 1.1, 1.2, metric="loss", higher=False),
        score("iid", "B", 2.0, 2.2, 2.1, metric="loss", higher=False),
        score("skewed", "A", metric=""),
        score("skewed", "B", 2.0, 2.2, 2.1, metric="loss", higher=False),
    )
    (found,) = judge([Claim(statement="s", better="A", worse=["B"])], CELLS, scores)
    assert (found.verdict, [cell.cell for cell in found.cells]) == ("holds", ["iid"])
    (none,) = judge([Claim(statement="s", better="A", worse=["B"], cells={"split": ["skewed"]})], CELLS, scores)
    assert none.reason is not None
    table = tabulate_verdicts([found, none])
    assert [row[1] for row in table.rows] == ["A over B"] * 2
    assert table.rows[0][2].startswith("+1.0")


def test_scores_of_several_metrics_have_no_mean() -> None:
    """A claim of cells with one kind alone is judged by that kind."""
    scores = (
        *SCORES[:1],
        *SCORES[2:3],
        score("skewed", "A", 1.0, 1.1, 1.2, metric="loss", higher=False),
        score("skewed", "B", 2.0, 2.2, 2.1, metric="loss", higher=False),
    )
    claim = Claim(statement="s", better="A", worse=["B"])
    (found,) = judge([claim], CELLS, scores)
    assert (found.verdict, found.reason) == ("not runnable here", "accuracy and loss have no mean: a claim for each")
    (found,) = judge([claim.model_copy(update={"cells": {"split": ["skewed"]}})], CELLS, scores)
    assert (found.verdict, found.metric) == ("holds", "loss")


def points(*scores: float, cost: int = 10) -> tuple[Point, ...]:
    return tuple(Point(number, score, number * cost, number * 0.5) for number, score in enumerate(scores, 1))


def test_the_cost_of_coming_to_nine_tenths_of_the_way() -> None:
    """From 0.5 to 0.9: the target is 0.86. B comes to 0.87 in its fourth and third round, A in its second."""
    scores = (
        score("iid", "A", 0.9, 0.9, curves=(points(0.5, 0.87, 0.9), points(0.7, 0.88, 0.9))),
        score(
            "iid", "B", 0.8, 0.8, curves=(points(0.5, 0.6, 0.7, 0.87, cost=20), points(0.5, 0.7, 0.87, 0.7, cost=20))
        ),
    )
    for kind, mean in (("rounds_to", 1.5), ("bytes_to", 10 * 5), ("seconds_to", 0.75)):
        claim = Claim.model_validate({"statement": "A is sooner", "better": "A", "worse": ["B"], "measure": kind})
        (found,) = judge([claim], CELLS[:1], scores)
        assert found.overall.mean == pytest.approx(mean)
        assert tabulate_verdicts([found]).rows[0][2].startswith("+")
    (found,) = judge([claim], CELLS[:1], (score("iid", "A", 0.9, curves=(points(0.9),)), score("iid", "B", 0.8)))
    assert found.verdict == "not runnable here"
    (found,) = judge([claim], CELLS[:1], (scores[0], score("iid", "B", 0.8, 0.8, curves=((), ()))))
    assert found.verdict == "not runnable here"


def test_a_row_that_never_comes_there_counts_with_all_that_it_cost() -> None:
    """So one that learns nothing is no reason to time the others to an untrained model's score."""
    learns = score("iid", "A", 0.9, 0.9, curves=(points(0.5, 0.9, 0.9, 0.9),) * 2)
    stuck = score("iid", "B", 0.5, 0.5, curves=(points(0.5, 0.5, 0.5, 0.5),) * 2)
    one = Claim(statement="A is sooner", better="A", worse=["B"], measure="rounds_to")
    (found,) = judge([one], CELLS[:1], (learns, stuck))
    assert (found.verdict, found.overall.mean, found.overall.bound) == ("holds", 2.0, "at least ")
    assert tabulate_verdicts([found]).rows[0][2] == "at least +2.0 ± 0.0 rounds"
    (other,) = judge([one.model_copy(update={"better": "B", "worse": ["A"]})], CELLS[:1], (learns, stuck))
    assert tabulate_verdicts([other]).rows[0][2] == "at most -2.0 ± 0.0 rounds"
    cheap = replace(stuck, curves=(points(0.5, 0.5, 0.5, 0.5, cost=1),) * 2)
    sent = one.model_copy(update={"measure": "bytes_to"})
    for better, worse in (("A", "B"), ("B", "A")):  # B's whole run is cheaper than A's way to the score
        (found,) = judge([sent.model_copy(update={"better": better, "worse": [worse]})], CELLS[:1], (learns, cheap))
        assert (found.verdict, found.cells[0].verdict) == ("inconclusive", "inconclusive")
    both = [replace(row, cell="skewed") for row in (learns, stuck)]
    swapped = [replace(row, method={"A": "B", "B": "A"}[row.method]) for row in both]
    (found,) = judge([one], CELLS, (learns, stuck, *swapped))
    assert (found.overall.bound, [cell.bound for cell in found.cells]) == ("about ", ["at least ", "at most "])


@pytest.mark.parametrize(("measure", "verdict"), [("alignment", "contradicted"), ("barrier", "holds")])
def test_what_is_measured_beside_scores(measure: str, verdict: str) -> None:
    scores = (
        score("iid", "A", 0.9, 0.9, 0.9, measured={measure: (0.1, 0.12, 0.11)}),
        score("iid", "B", 0.9, 0.9, 0.9, measured={measure: (0.4, 0.41, 0.43)}),
    )
    claim = Claim.model_validate({"statement": "", "better": "A", "worse": ["B"], "measure": measure})
    assert judge([claim], CELLS[:1], scores)[0].verdict == verdict
    (found,) = judge([claim], CELLS[:1], (scores[0], score("iid", "B", 0.9, measured={measure: (None,)})))
    assert found.verdict == "not runnable here"


def test_a_score_is_reached_from_below_or_from_above() -> None:
    found = [
        find_target_round(points(0.1, 0.5, 0.4, 0.6), 0.5, True),
        find_target_round(points(2.0, 1.5, 1.0), 1.6, False),
    ]
    assert [point and point.round for point in found] == [2, 2]
    assert find_target_round(points(0.1), 0.2, True) is None
    assert compute_target([points(2.0, 1.5), points(3.0, 1.0)], higher=False) == pytest.approx(3.0 - 0.9 * 2.0)
    assert compute_target([points(0.5, 0.6), points(0.2, 0.7)], higher=True) == pytest.approx(0.2 + 0.9 * 0.5)
    assert compute_target([points(0.5), ()], higher=True) is None


@pytest.mark.parametrize(
    ("metric", "mean", "shown"),
    [
        ("accuracy", 0.05, "+5.0 ± 1.0"),
        ("exact_match", 0.05, "+5.0 ± 1.0"),
        ("loss", -0.25, "-0.2500 ± 0.0100"),
        ("barrier", 0.05, "+0.05 ± 0.01"),
        ("bytes_up", 2.5e6, "+2.500 MB"),
        ("bytes_to", 2.5e6, "+2.500 ± 0.000 MB"),
        ("rounds_to", -2.67, "-2.7 ± 0.0 rounds"),
    ],
)
def test_a_difference_has_its_own_unit(metric: str, mean: float, shown: str) -> None:
    assert format_difference(metric, JudgedCell("all", mean, 0.01, "holds")) == shown


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of pairs of the rounds that were diagnosed."""
    pairs_asked: list[int] = []

    def diagnose(folder: Path, *, pairs: int) -> Any:
        pairs_asked.append(pairs)
        heights = [SimpleNamespace(height=value) for value in (1.0, 2.0, 6.0)[:pairs]]
        return SimpleNamespace(barriers=heights, alignment=math.nan if pairs else 0.5)

    monkeypatch.setattr(reproduce, "diagnose", diagnose)
    return pairs_asked


def write_metrics(folder: Path, *alignments: Any) -> None:
    with JsonLines(RunFolder(folder).metrics) as lines:
        for round, value in enumerate(alignments, start=1):
            lines.append({"round": round, **({} if value == "" else {"diagnostics": {"alignment": value}})})
        lines.commit()


def test_recorded_alignments_of_the_second_half_are_averaged(tmp_path: Path, asked: list[int]) -> None:
    write_metrics(tmp_path, 0.9, "", 0.9, 0.9, 0.25, "", None, 0.75)
    assert measure(tmp_path, ["alignment"]) == {"alignment": 0.5}
    assert asked == []


def test_without_a_record_one_more_round_is_diagnosed(tmp_path: Path, asked: list[int]) -> None:
    write_metrics(tmp_path, 0.9, "", "")
    assert measure(tmp_path, ["alignment"]) == {"alignment": 0.5}
    assert measure(tmp_path, ["barrier"]) == {"barrier": 3.0}
    assert measure(tmp_path, ["barrier", "alignment"]) == {"barrier": 3.0, "alignment": None}
    assert asked == [0, 3, 3]


def test_the_last_step_is_relative_and_of_the_target_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from fedspan.core.values import ServerState

    states: dict[str | int, ServerState] = {
        "last": ServerState(3, {"fc/A": torch.tensor([[3.0, 4.5]]), "extras/head": torch.ones(2)}),
        2: ServerState(2, {"fc/A": torch.tensor([[3.0, 4.0]]), "extras/head": torch.zeros(2)}),
    }
    monkeypatch.setattr(reproduce.checkpoints, "select_checkpoint", lambda run, round: round)
    monkeypatch.setattr(reproduce, "load_checkpoint", lambda place: SimpleNamespace(state=states[place]))
    assert measure(tmp_path, ["state_step"]) == {"state_step": pytest.approx(0.1)}
    states[2] = ServerState(2, {"fc/A": torch.zeros(1, 2)})
    assert measure(tmp_path, ["state_step"]) == {"state_step": None}  # from nothing
    states[2] = ServerState(2, {"fc/A": torch.zeros(2, 1)})
    assert measure(tmp_path, ["state_step"]) == {"state_step": None}  # of other coordinates
    states["last"] = ServerState(1)
    assert measure(tmp_path, ["state_step"]) == {"state_step": None}


def score_by_value(method: str, **by_value: tuple[float | None, ...]) -> CellScore:
    return CellScore("all", method, {}, "accuracy", True, (0.5, 0.7), 0.6, 0.14, 1.0, 1.0, 1.0, by_value=by_value)


def reproduction(*scores: CellScore) -> Reproduction:
    return Reproduction("x", "small", (0, 1), scores, (), "folder", Table((), (), None, ()))


def test_the_table_by_value_has_the_mean_in_which_each_value_counts_alike() -> None:
    table = reproduction(
        score_by_value("FedIT", photo=(0.9, 0.8), sketch=(0.3, 0.4)), score_by_value("failed")
    ).build_value_table()
    assert table.head == ("cell", "method", "photo", "sketch", "mean")
    assert table.rows[0] == ("all", "FedIT", "85.0 ± 7.1", "35.0 ± 7.1", "60.0 ± 0.0")
    assert table.rows[1] == ("all", "failed", "-", "-", "-")
    table = reproduction(score_by_value("FedIT", photo=(0.9, 0.8), sketch=(None, 0.4))).build_value_table()
    assert table.rows[0] == ("all", "FedIT", "85.0 ± 7.1", "-", "-")
    assert reproduction(score_by_value("FedIT")).build_value_table() is None
