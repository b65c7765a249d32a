"""Tables of a reproduction."""

from __future__ import annotations

from fedspan.experiments.tables import Table
from fedspan.reproduction.reproduce import Reproduction
from fedspan.reproduction.verdicts import CellScore


def score(method: str, **by_value: tuple[float | None, ...]) -> CellScore:
    return CellScore("all", method, {}, "accuracy", True, (0.5, 0.7), 0.6, 0.14, 1.0, 1.0, 1.0, by_value=by_value)


def reproduction(*scores: CellScore) -> Reproduction:
    return Reproduction("x", "small", (0, 1), scores, (), "folder", Table((), (), None, ()))


def test_the_table_by_value_has_the_mean_in_which_each_value_counts_alike() -> None:
    table = reproduction(score("FedIT", photo=(0.9, 0.8), sketch=(0.3, 0.4)), score("failed")).build_value_table()
    assert table is not None
    assert table.head == ("cell", "method", "photo", "sketch", "mean")
    assert table.rows[0] == ("all", "FedIT", "85.0 ± 7.1", "35.0 ± 7.1", "60.0 ± 0.0")
    assert table.rows[1] == ("all", "failed", "-", "-", "-")


def test_a_value_without_a_score_has_no_mean() -> None:
    table = reproduction(score("FedIT", photo=(0.9, 0.8), sketch=(None, 0.4))).build_value_table()
    assert table is not None
    assert table.rows[0] == ("all", "FedIT", "85.0 ± 7.1", "-", "-")


def test_without_values_there_is_no_table() -> None:
    assert reproduction(score("FedIT")).build_value_table() is None
