"""Places of files with patterns."""

from __future__ import annotations

from pathlib import Path

from fedspan.data.loading import load
from fedspan.data.path_patterns import match_paths
from helpers.written_data import CSV, config_for, written


def test_a_place_that_occurs_twice_is_the_same_twice(tmp_path: Path) -> None:
    for site, name in (("a", "a"), ("a", "b"), ("b", "b")):
        (tmp_path / site).mkdir(exist_ok=True)
        written(tmp_path / site, f"{name}-{name}.csv", CSV)
        written(tmp_path / site, f"{name}-x.csv", CSV)
    found = match_paths(str(tmp_path / "{site}" / "{site}-{site}.csv"), "data.train")
    assert [(path.relative_to(tmp_path).as_posix(), values) for path, values in found.items()] == [
        ("a/a-a.csv", {"site": "a"}),
        ("b/b-b.csv", {"site": "b"}),
    ]
    both = match_paths(str(tmp_path / "{site}" / "{name}-x.csv"), "data.train")
    assert [tuple(values.values()) for values in both.values()] == [("a", "a"), ("a", "b"), ("b", "b")]


def test_a_file_whose_name_has_braces_is_that_file(tmp_path: Path) -> None:
    path = written(tmp_path, "{site}.csv", CSV)
    written(tmp_path, "other.csv", CSV)
    assert "site" not in load(config_for(path)).train.column_names
