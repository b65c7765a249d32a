"""Folders of text files by class."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedspan.data import PartitionConfig
from fedspan.data.config import DataConfig
from fedspan.data.loading import load
from fedspan.data.partition import partition
from fedspan.errors import FedspanError

Refused = Callable[..., FedspanError]


def saved(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"text of {name}")
    return root


def test_a_folder_for_each_class(tmp_path: Path) -> None:
    root = saved(tmp_path / "imdb", "pos/1.txt", "pos/2.txt", "neg/1.TXT", "neg/.hidden.txt", "README.txt", "neg/a.pdf")
    data = load(DataConfig(train=str(root), test_fraction=0))
    assert data.labels == ("neg", "pos")
    assert data.train.to_dict() == {
        "text": ["text of neg/1.TXT", "text of pos/1.txt", "text of pos/2.txt"],
        "label": [0, 1, 1],
        "file": ["neg/1.TXT", "pos/1.txt", "pos/2.txt"],
    }
    words = "left out 3 files that are not examples (README.txt, neg/.hidden.txt, neg/a.pdf)"
    assert data.notes == (f"{root}: {words}",)


def test_a_folder_for_each_domain_gives_natural_clients(tmp_path: Path) -> None:
    names = [f"{site}/{label}/{number}.txt" for site in ("north", "south") for label in "ab" for number in range(3)]
    data = load(DataConfig(train=str(saved(tmp_path, *names)), test_fraction=0))
    parts = partition(data.train, PartitionConfig(partitioner="natural", column="domain"), 0)
    assert [client.id for client in parts.clients] == ["north", "south"]


def test_folders_that_are_laid_out_otherwise(tmp_path: Path, refused: Refused) -> None:
    for names, words in (
        (["a/1.txt", "b/c/d/1.txt"], "for all files, got a/1.txt and b/c/d/1.txt"),
        (["train/a/1.txt", "test/a/1.txt"], "it holds the parts test, train; name the folder of one"),
    ):
        root = saved(tmp_path / names[0][0], *names)
        refused("data.train", str(root), [words], load, DataConfig(train=str(root)))


def test_a_file_that_is_no_text(tmp_path: Path, refused: Refused) -> None:
    root = saved(tmp_path, "a/1.txt", "b/1.txt")
    (root / "a" / "1.txt").write_bytes(b"\xff")
    config = DataConfig(train=str(root), encoding="utf-8")
    refused("data.train", str(root), ["a/1.txt: line 1 is not in utf-8"], load, config)


def test_short_files_that_are_not_unicode_are_in_one_encoding(tmp_path: Path) -> None:
    """Each alone is too short to tell cp1252 from cp1250 or Mac Roman."""
    root = saved(tmp_path, *(f"{'ab'[number % 2]}/{number}.txt" for number in range(60)))
    texts = [f"Das Paket {number} ist {word}, é" for number, word in enumerate(["großartig", "schön", "gut"] * 20)]
    for number, text in enumerate(texts):
        (root / "ab"[number % 2] / f"{number}.txt").write_bytes(text.encode("latin-1"))
    data = load(DataConfig(train=str(root), test_fraction=0))
    assert sorted(data.train["text"]) == sorted(texts)
    assert data.notes == (f"{root}: detected encoding cp1252 in 60 of 60 files (data.encoding)",)
