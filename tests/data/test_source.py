"""References to examples in messages: rows of the file that they were read from, whatever was left out or joined."""

from __future__ import annotations

import datasets

from fedspan.data.source import Source


def source(count: int = 6, **facts: object) -> Source:
    return Source(datasets.Dataset.from_dict({"text": [f"text {row}" for row in range(count)]}), "a.csv", **facts)  # type: ignore[arg-type]


def test_rows_count_from_1_below_the_header() -> None:
    assert source().row(0) == "row 1 of a.csv"
    assert source(header=2).row(3) == "row 6 of a.csv"


def test_rows_that_were_left_out_count() -> None:
    assert source(3, header=1, positions=[0, 4, 5]).place(1) == ("a.csv", 6)


def test_joined_files_have_rows_and_headers_of_their_own() -> None:
    joined = source(files=(("a.csv", 2, 1), ("b.csv", 1, 0), ("c.csv", 3, 2)))
    assert [joined.place(index) for index in range(6)] == [
        ("a.csv", 2),
        ("a.csv", 3),
        ("b.csv", 1),
        ("c.csv", 3),
        ("c.csv", 4),
        ("c.csv", 5),
    ]


def test_selected_rows_keep_their_positions() -> None:
    """Selected once or twice."""
    chosen = source(header=1).select([5, 2, 3])
    assert list(chosen.dataset["text"]) == ["text 5", "text 2", "text 3"]
    assert [chosen.place(index)[1] for index in range(3)] == [7, 4, 5]
    again = chosen.select([1, 0])
    assert list(again.dataset["text"]) == ["text 2", "text 5"]
    assert [again.place(index)[1] for index in range(2)] == [4, 7]
