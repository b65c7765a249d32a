"""The identity of data by their content: equal for copies, links and other names, unequal for any other content."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from fedspan.data.content import compute_content_digest
from fedspan.errors import FedspanError


def digest(where: object) -> str:
    return compute_content_digest(str(where), "data.train")


def test_a_file_is_its_content(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text,label\n")
    (tmp_path / "b.tsv").write_bytes(b"text,label\n")
    (tmp_path / "link").symlink_to(tmp_path / "a.csv")
    inner = hashlib.sha256(b"text,label\n").hexdigest()
    assert digest(tmp_path / "a.csv") == hashlib.sha256(f"files\n{inner}".encode()).hexdigest()
    assert digest(tmp_path / "a.csv") == digest(tmp_path / "b.tsv") == digest(tmp_path / "link")
    (tmp_path / "b.tsv").write_bytes(b"text,label\nx,y\n")
    assert digest(tmp_path / "a.csv") != digest(tmp_path / "b.tsv")


def test_a_folder_and_a_pattern_are_all_their_files(tmp_path: Path) -> None:
    for folder, names in (("one", ("a.csv", "b.csv")), ("two", ("z.csv", "c.csv"))):
        (tmp_path / folder / "deep").mkdir(parents=True)
        (tmp_path / folder / names[0]).write_text("first")
        (tmp_path / folder / names[1]).write_text("second")
        (tmp_path / folder / ".hidden").write_text(folder)
    assert digest(tmp_path / "one") == digest(tmp_path / "two") == digest(tmp_path / "one" / "{name}.csv")
    (tmp_path / "two" / "deep" / "d.csv").write_text("third")
    assert digest(tmp_path / "one") != digest(tmp_path / "two")


def test_a_name_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert digest("owner/set") != digest("owner/other")
    assert digest("owner/set") == digest("owner/set")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.csv").touch()

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(FedspanError, match=r"`data\.train`.*Permission denied"):
        digest(tmp_path / "a.csv")


def test_an_unchanged_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of the same size is noticed, also if the time of the last change is put back."""
    opened: list[str] = []
    file, compute = tmp_path / "train.csv", hashlib.file_digest

    def record(stream: Any, name: str) -> Any:
        opened.append(stream.name)
        return compute(stream, name)

    monkeypatch.setattr(hashlib, "file_digest", record)

    def write(text: str) -> None:
        replacement = tmp_path / ".new"
        replacement.write_text(text)
        os.utime(replacement, (10**9, 10**9))
        replacement.replace(file)

    write("a,b")
    first = digest(tmp_path)
    assert (digest(tmp_path), digest(file), opened) == (first, first, [str(file)])
    write("c,d")
    assert digest(file) != first
    assert len(opened) == 2
    os.utime(file)  # just changed: it may change again without another time
    digest(file)
    digest(file)
    assert len(opened) == 4
