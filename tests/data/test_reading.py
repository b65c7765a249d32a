"""The beginning of a file, packed or not."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from fedspan.data.reading import read_beginning


@pytest.mark.parametrize("name", ["table.csv", "table.csv.gz"])
def test_a_file_is_read_up_to_a_limit_and_whole_without_one(tmp_path: Path, name: str) -> None:
    """The limit counts unpacked bytes, and a file of just as many is whole."""
    content, path = b"text,label\n" * 1000, tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert read_beginning(path, None) == (content, True)
    assert read_beginning(path, len(content)) == (content, True)
    assert read_beginning(path, len(content) - 1) == (content[:-1], False)
    assert read_beginning(path, 4) == (b"text", False)


def test_what_cannot_be_read_or_unpacked_is_an_error_of_the_disk(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_beginning(tmp_path / "missing.csv", 10)
    path = tmp_path / "broken.csv.gz"
    path.write_bytes(gzip.compress(b"text,label\n" * 1000)[:-30] + b"x" * 30)
    with pytest.raises(OSError, match=r"zlib|CRC|inflate"):
        read_beginning(path, None)
