"""Archives, Excel and CoNLL files, out of which nothing leads; and the identity of data by their content."""

import csv
import datetime
import gzip
import hashlib
import io
import os
import stat
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets
import numpy as np
import openpyxl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedspan.data import PartitionConfig, archives, duplicates
from fedspan.data.archives import read_archive
from fedspan.data.config import DataConfig
from fedspan.data.conll import has_sentences
from fedspan.data.content import compute_content_digest
from fedspan.data.files import read_source
from fedspan.data.loading import load
from fedspan.data.partition import Partition, partition
from fedspan.errors import FedspanError
from fedspan.tasks.registry import get_task
from helpers import refusals
from helpers.refusals import Refused

SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


def png(shade: int) -> bytes:
    out = io.BytesIO()
    Image.new("L", (4, 5), shade).save(out, "PNG")
    return out.getvalue()


def packed(path: Path, files: Mapping[str, bytes]) -> Path:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        return path
    kind = {".tar": "", ".gz": "gz", ".tgz": "gz", ".bz2": "bz2", ".xz": "xz"}[path.suffix]
    with tarfile.open(path, f"w:{kind}") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_images_by_class(tmp_path: Path, suffix: str) -> None:
    files = {f"flowers/{label}/{number}.png": png(10 * number) for label in ("rose", "tulip") for number in range(3)}
    files |= {"flowers/README.md": b"notes", "__MACOSX/flowers/rose/._0.png": b"x", "flowers/.DS_Store": b"x"}
    path = packed(tmp_path / f"flowers{suffix}", files)
    data = load(DataConfig(train=str(path), test_fraction=0), task=get_task("image-classification").columns)
    assert data.labels == ("rose", "tulip")
    assert data.train["label"][:] == [0, 0, 0, 1, 1, 1]
    assert [image.getpixel((0, 0)) for image in data.train["image"]] == [0, 10, 20] * 2
    assert "left out 3 files that are not examples" in data.notes[0]


@pytest.mark.parametrize("suffix", [".zip", ".tar"])
def test_braces_in_the_path_of_archives(tmp_path: Path, suffix: str) -> None:
    """An archive a domain, as PACS is packed; its name in the archive, too."""
    for shade, domain in enumerate(("photo", "sketch")):
        packed(tmp_path / f"{domain}{suffix}", {f"{domain}/{label}/1.png": png(shade) for label in ("cat", "dog")})
    path = str(tmp_path / f"{{domain}}{suffix}")
    data = load(DataConfig(train=path, test_fraction=0), task=get_task("image-classification").columns)
    assert (data.train["label"][:], data.train["domain"][:]) == ([0, 1, 0, 1], ["photo", "photo", "sketch", "sketch"])
    assert [image.getpixel((0, 0)) for image in data.train["image"]] == [0, 0, 1, 1]


def test_a_damaged_archive_among_several(tmp_path: Path, refused: Refused) -> None:
    packed(tmp_path / "photo.tar", {f"{label}/1.png": png(0) for label in ("cat", "dog")})
    broken = tmp_path / "sketch.tar"
    broken.write_bytes(b"no archive")
    refused(
        "data.train",
        str(broken),
        ["cannot be read as an archive"],
        load,
        DataConfig(train=f"{tmp_path}/{{domain}}.tar"),
    )


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_texts_by_domain_and_class(tmp_path: Path, suffix: str) -> None:
    files = {f"{site}/{label}/1.txt": f"{site} {label} é".encode("latin-1") for site in "ab" for label in ("no", "yes")}
    data = load(DataConfig(train=str(packed(tmp_path / f"t{suffix}", files)), test_fraction=0))
    assert data.train.to_dict() == {
        "text": ["a no é", "a yes é", "b no é", "b yes é"],
        "label": [0, 1, 0, 1],
        "domain": ["a", "a", "b", "b"],
        "file": ["a/no/1.txt", "a/yes/1.txt", "b/no/1.txt", "b/yes/1.txt"],
    }
    assert data.notes == (f"{tmp_path / f't{suffix}'}: detected encoding cp1252 in 4 of 4 files (data.encoding)",)


@pytest.mark.parametrize("suffix", [".zip", ".tar.gz"])
def test_files_that_are_no_examples_are_left_out_and_counted(tmp_path: Path, suffix: str) -> None:
    """A README at the top, as nearly every download has one."""
    files = {f"mails/{label}/{number}.txt": b"some words" for label in ("ham", "spam") for number in range(2)}
    about = ["mails/README.txt", "mails/LICENSE", "__MACOSX/mails/._ham", "mails/ham/.DS_Store"]
    path = packed(tmp_path / f"mails{suffix}", {**{name: b"about" for name in about}, **files, "notes.txt": b"about"})
    data = load(DataConfig(train=str(path), test_fraction=0))
    assert (data.labels, len(data.train)) == (("ham", "spam"), 4)
    words = "left out 5 files that are not examples (mails/README.txt, mails/LICENSE, __MACOSX/mails/._ham, ...)"
    assert data.notes[0] == f"{path}: {words}"


@pytest.mark.parametrize("suffix", [".zip", ".tar"])
@pytest.mark.parametrize(
    "name", ["../rose/1.png", "a/../../1.png", "/etc/rose/1.png", "C:/rose/1.png", "..\\rose\\1.png"]
)
def test_a_name_that_leads_out_of_the_archive(tmp_path: Path, refused: Refused, suffix: str, name: str) -> None:
    path = packed(tmp_path / f"t{suffix}", {"a/1.png": png(0), name: png(0)})
    refused("data.train", str(path), ["leads out of the archive"], load, DataConfig(train=str(path)))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_in_a_tar(tmp_path: Path, kind: bytes) -> None:
    path = tmp_path / "t.tar"
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo("rose/1.png")
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
    with pytest.raises(ValueError, match=r"rose/1\.png is a link or a device"):
        read_archive(path, {".png"})


def test_a_link_in_a_zip(tmp_path: Path) -> None:
    path = tmp_path / "t.zip"
    with zipfile.ZipFile(path, "w") as archive:
        info = zipfile.ZipInfo("rose/1.png")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(info, "/etc/passwd")
    with pytest.raises(ValueError, match=r"rose/1\.png is a link or a device"):
        read_archive(path, {".png"})


@pytest.mark.parametrize("suffix", [".zip", ".tar.xz"])
def test_contents_beyond_the_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """A few bytes that unpack to many; the bound is on what is read, not on what the archive promises."""
    bomb = packed(tmp_path / f"bomb{suffix}", {"rose/1.png": bytes(1 << 22), "rose/2.png": bytes(1 << 22)})
    assert bomb.stat().st_size < 10_000
    monkeypatch.setattr(archives, "_FILE_BYTES", 1 << 21)
    with pytest.raises(ValueError, match=r"rose/1\.png exceeds the bounds \(2 MiB a file"):
        read_archive(bomb, {".png"})
    monkeypatch.setattr(archives, "_FILE_BYTES", 1 << 28)
    monkeypatch.setattr(archives, "_TOTAL_BYTES", 6 << 20)
    with pytest.raises(ValueError, match=r"rose/2\.png exceeds the bounds"):
        read_archive(bomb, {".png"})
    monkeypatch.setattr(archives, "_FILES", 1)
    with pytest.raises(ValueError, match="more than 1 files"):
        read_archive(bomb, {".png"})


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_archive_that_is_damaged_or_none(tmp_path: Path, suffix: str) -> None:
    path = packed(tmp_path / f"t{suffix}", {f"rose/{number}.png": png(number) for number in range(40)})
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"no archive", b""):
        path.write_bytes(damaged)
        with refusals.refused("data.train"):
            load(DataConfig(train=str(path)), task=get_task("image-classification").columns)


def test_an_archive_without_images_or_texts(tmp_path: Path, refused: Refused) -> None:
    path = packed(tmp_path / "t.zip", {"a/b.pdf": b"text"})
    refused("data.train", str(path), ["t.zip holds none"], load, DataConfig(train=str(path)))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"a/b.csv": b"text,label\n"}, "it holds a/b.csv, and tables are not read inside archives. Unpack it"),
        ({"images/1.png": b"", "images/2.png": b"", "labels.csv": b"file,label\n"}, "it holds labels.csv, and tables"),
        ({f"{part}/{label}/1.png": b"" for part in ("train", "test") for label in "ab"}, "unpack an archive before"),
    ],
)
def test_an_archive_that_must_be_unpacked(
    tmp_path: Path, refused: Refused, files: Mapping[str, bytes], words: str
) -> None:
    path = packed(tmp_path / "t.zip", files)
    refused("data.train", str(path), [words], load, DataConfig(train=str(path)))


def workbook(path: Path, **sheets: Sequence[Sequence[Any]]) -> Path:
    book = openpyxl.Workbook()
    book.remove(book.worksheets[0])
    for name, rows in sheets.items():
        sheet = book.create_sheet(name)
        for row in rows:
            sheet.append(list(row))
    book.save(path)
    return path


ROWS = [("note", "stars"), ("good, really", 5), ("bad\nin two lines", 1), ("12", 5), ("so so", 3)]


def test_a_sheet_is_a_table(tmp_path: Path) -> None:
    path = workbook(tmp_path / "t.xlsx", Reviews=ROWS)
    data = load(DataConfig(train=str(path), text="note", label="stars", test_fraction=0))
    assert data.train["text"][:] == ["good, really", "bad\nin two lines", "12", "so so"]
    assert data.labels == ("1", "3", "5")
    assert data.notes == ("labels: 2 of 3 have only one example: 1, 3",)


def test_cells_of_every_kind(tmp_path: Path) -> None:
    when = datetime.datetime(2026, 11, 24, 8, 30)
    path = workbook(tmp_path / "t.xlsx", S=[("n", "x", "when", "ok"), (1, 1.5, when, True), (None, 2, when, None), ()])
    dataset = read_source(DataConfig(train=str(path)), "train", "data").dataset
    assert dataset.to_dict() == {
        "n": [1, None],
        "x": [1.5, 2.0],
        "when": ["2026-11-24T08:30:00"] * 2,
        "ok": [True, None],
    }


def test_the_first_sheet_or_the_one_that_is_named(tmp_path: Path, refused: Refused) -> None:
    path = workbook(tmp_path / "t.xlsx", First=[("text", "label"), ("a", "x"), ("b", "y")], Second=ROWS)
    data = load(DataConfig(train=str(path), test_fraction=0))
    assert data.notes[0] == f"{path}: sheet 'First' of First, Second (data.sheet)"
    config = DataConfig(train=str(path), sheet="Second", text="note", label="stars", test_fraction=0)
    assert len(load(config).train) == 4
    wrong = DataConfig(train=str(path), sheet="Secnod")
    refused("data.sheet", "Secnod", ["has no sheet", "Did you mean 'Second'"], load, wrong)


def test_a_sheet_without_a_header(tmp_path: Path) -> None:
    path = workbook(tmp_path / "t.xlsx", S=ROWS[1:])
    data = load(DataConfig(train=str(path), text="column_1", label="column_2", test_fraction=0))
    assert len(data.train) == 4
    assert "the first line looks like an example" in data.notes[0]
    named = load(DataConfig(train=str(path), columns=["text", "label"], test_fraction=0))
    assert named.train.column_names == ["text", "label"]
    with refusals.refused("data.train"):
        load(DataConfig(train=str(path), columns=["text", "label", "more"]))


def test_without_the_extra(tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    path = workbook(tmp_path / "t.xlsx", S=ROWS)
    monkeypatch.setitem(sys.modules, "python_calamine", None)
    refused("data.train", str(path), ["pip install 'fedspan[excel]'"], load, DataConfig(train=str(path)))


def test_title_rows_above_the_column_names(tmp_path: Path) -> None:
    path = workbook(tmp_path / "t.xlsx", S=[("Survey 2026", None), ("confidential",), (), *ROWS])
    source = read_source(DataConfig(train=str(path)), "train", "data")
    assert source.dataset.column_names == ["note", "stars"]
    assert "left out above the column names: 'Survey 2026', 'confidential'" in source.notes[0]
    assert source.row(0) == f"row 4 of {path}"
    named = read_source(DataConfig(train=str(path), header=True), "train", "data")
    assert named.dataset.column_names == ["Survey 2026", "column_2"]


TASK = get_task("token-classification").columns


SENTENCES = "-DOCSTART- O\n\nAspirin\tB-Drug\nhelps\tO\n\nThe\tO\nTP53\tB-Gene\ngene\tI-Gene\n\n\nRest\tO\n"


@pytest.mark.parametrize("name", ["a.conll", "a.tsv", "a.txt", "a.tsv.gz", "a.conll.gz"])
def test_sentences_are_read_from_files(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    content = SENTENCES.encode()
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    data = load(DataConfig(train=str(path), test_fraction=0), task=TASK)
    assert data.labels == ("O", "B-Drug", "I-Drug", "B-Gene", "I-Gene")
    assert data.train["tokens"][:] == [["Aspirin", "helps"], ["The", "TP53", "gene"], ["Rest"]]
    assert data.train["labels"][:] == [[1, 0], [0, 3, 4], [0]]
    assert data.train["text"][:] == ["Aspirin helps", "The TP53 gene", "Rest"]
    assert any("CoNLL" in note for note in data.notes)


def test_columns_between_word_and_tag_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "a.conll"
    path.write_text("EU NNP B-NP I-ORG\nrejects VBZ B-VP O\n\nPeter NNP B-NP I-PER\n")
    data = load(DataConfig(train=str(path), test_fraction=0), task=TASK)
    assert [[data.labels[at] for at in row] for row in data.train["labels"][:]] == [["B-ORG", "O"], ["B-PER"]]


@pytest.mark.parametrize(
    "content",
    [
        "text\tlabel\none\tO\n\ntwo\tB-x\n",  # a header
        "one\tO\nanother text\tB-x\n",  # no sentences, but labeled texts
        "one\tO\n\ntwo\tO\n",  # no entities
        "a word\tx\tO\n\none\tB-x\n",  # numbers of columns differ
        "",
    ],
)
def test_other_tables_are_not_sentences(content: str, tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text(content)
    assert not has_sentences(path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("Aspirin\tB-Drug\rhelps\tO\r\rRest\tO\r", [["Aspirin", "helps"], ["Rest"]]),  # ends of lines of old Macs
        ("Aspirin\tB-Drug\r\nhelps\tO\r\n\r\nRest\tO", [["Aspirin", "helps"], ["Rest"]]),
        ("10\xa0mg B-Dose\n\nnew\x85line O\n", [["10\xa0mg"], ["new\x85line"]]),  # no separators of columns or lines
        ("Aspirin\tB-Drug\nhelps\tO\n", [["Aspirin", "helps"]]),  # a single sentence
        ("word\tPOS\tner\nword NN\tNN\tO\nTP53\tNN\tB-Gene\n\nRest\tX\tO\n", [["word NN", "TP53"], ["Rest"]]),
        ("-DOCSTART- -X- O O\n\nToken POS Chunk Tag\nEU NN B-NP B-ORG\n\nit X X O\n", [["EU"], ["it"]]),  # headers
        ("New York\tB-Place\n\nRest\tO\n", [["New York"], ["Rest"]]),
        ("\xa0\tO\nAspirin\tB-Drug\n\nRest\tO\n", [["\xa0", "Aspirin"], ["Rest"]]),  # a blank word
        ("Aspirin\tB-Drug\t\nhelps\tO\t\t\n\nRest\tO\n", [["Aspirin", "helps"], ["Rest"]]),  # empty columns
        ("# id 7\nAspirin B-Drug\n# B O\n\n# O\nRest O\n", [["Aspirin"], ["#", "Rest"]]),  # comments; a word "#"
    ],
)
def test_unusual_lines_are_detected_and_read_alike(content: str, expected: list[list[str]], tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content.encode())
    assert has_sentences(path)
    data = load(DataConfig(train=str(path), test_fraction=0), task=TASK)
    assert data.train["tokens"][:] == expected


def test_a_line_without_a_tag_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.conll"
    path.write_text("one\tO\n\ntwo\tB-x\nthree\tDrug\n")
    with refusals.refused("data.train"):
        load(DataConfig(train=str(path)), task=TASK)


def test_the_beginning_of_a_file_ends_with_a_whole_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.conll"
    path.write_text("one\tO\ntwo\tB-x\n\n" * 50)
    data = load(DataConfig(train=str(path), test_fraction=0), task=TASK, limit=200)
    assert not data.is_complete
    assert {len(row) for row in data.train["tokens"][:]} == {2}
    assert 0 < len(data.train) < 50


def test_a_file_whose_beginning_has_no_entity_is_read(tmp_path: Path) -> None:
    sentence = "word\tO\nother\tO\n\n"
    path = tmp_path / "a.tsv"
    path.write_text(sentence * 2000 + "Aspirin\tB-Drug\n")
    assert len(sentence) * 2000 > 1 << 14
    data = load(DataConfig(train=str(path), test_fraction=0), task=TASK)
    assert data.labels == ("O", "B-Drug", "I-Drug")
    assert data.train["labels"][:][-1] == [1]


@pytest.mark.parametrize("name", ["a.conll", "a.tsv", "a.txt"])
def test_tags_without_a_type_are_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text("helps\tO\nAspirin\tB\n\nRest\tO\n")
    with refusals.refused("data.train"):
        load(DataConfig(train=str(path), test_fraction=0), task=TASK)


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
    monkeypatch.setattr(Path, "open", Mock(side_effect=PermissionError(13, "Permission denied")))
    with refusals.refused("data.train"):
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


def table(path: Path, rows: Sequence[tuple[str, ...]], *header: str) -> str:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return str(path)


def parts_of(parts: Partition) -> dict[int, tuple[int, int]]:
    """Client and split of each row."""
    return {
        int(row): (number, split)
        for number, client in enumerate(parts.clients)
        for split, rows in enumerate((client.train, client.validation, client.test))
        for row in rows
    }


REPEATED = [(f"text {number % 40}", "ab"[number % 2]) for number in range(120)]


def test_test_examples_that_are_in_train_are_counted(tmp_path: Path) -> None:
    train = table(tmp_path / "train.csv", REPEATED[:40], "text", "label")
    test = table(tmp_path / "test.csv", [(" text 3 ", "b"), ("text 4", "b"), ("new", "a")], "text", "label")
    data = load(DataConfig(train=train, test=test))
    assert data.notes == ("duplicates: 2 of 3 test examples also occur in data.train",)
    assert load(DataConfig(train=train)).notes == ()


def test_duplicates_of_a_file_are_counted_and_can_be_kept_together(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", REPEATED, "note", "label")
    how = PartitionConfig(clients=4)
    data = load(DataConfig(train=path, text="note"))
    assert "held-out test examples also occur in training (data.group: note keeps" in data.notes[0]
    parts = partition(data.train, how, 0)
    (note,) = duplicates.describe_shared(data.train, parts, DataConfig(train=path, text="note"), False)
    assert "training examples occur at several clients (data.group: note keeps equal examples together)" in note

    config = DataConfig(train=path, text="note", group="note")
    data = load(config)
    assert not set(data.train["text"]) & set(data.test["text"])
    assert 15 <= len(data.test) <= 33  # a fifth of 120, in whole groups of 3
    assert data.notes == ()
    parts = partition(data.train, how, 0, groups=data.groups)
    assert duplicates.find_shared_between_clients(data.train, parts) == (0, 0)
    assert duplicates.describe_shared(data.train, parts, config, False) == ()
    assert sum(len(client.indices) for client in parts.clients) == len(data.train)
    assert all(len(client.train) and len(client.validation) and len(client.test) for client in parts.clients)


def test_a_column_of_a_few_values_is_hardly_one_of_contents() -> None:
    shops = datasets.Dataset.from_dict({"text": [f"shop {number % 6}" for number in range(60)]})
    assert (
        duplicates.advise_grouping(shops, "s") == "only 6 of 60 examples are distinct: check that s is the right column"
    )
    assert duplicates.advise_grouping(shops.select(range(59)), "s") == "data.group: s keeps equal examples together"


def test_counts_are_those_of_the_rows_and_pairs_are_equal_if_both_texts_are() -> None:
    data = datasets.Dataset.from_dict({"text": ["a", "a", "b", "b", "c", "d"]})
    rows = [([0, 4], [1], []), ([2, 5], [], [3])]
    from fedspan.data.partition import ClientPart

    clients = [ClientPart(str(number), *map(np.array, part)) for number, part in enumerate(rows)]
    assert duplicates.find_shared_between_clients(data, Partition(clients, 6)) == (2, 0)
    rows = [([0, 4], [], []), ([1, 2, 3], [5], [])]
    clients = [ClientPart(str(number), *map(np.array, part)) for number, part in enumerate(rows)]
    assert duplicates.find_shared_between_clients(data, Partition(clients, 6)) == (0, 2)
    data = datasets.Dataset.from_dict({"text": ["a", "a", "a"], "text_pair": ["b", "c", " b"]})
    codes = duplicates.encode_contents(data)[0]
    assert codes[0] == codes[2] != codes[1]


def test_images_are_equal_if_their_files_are(tmp_path: Path) -> None:
    for label, names in (("a", (1, 2, 1)), ("b", (1, 3, 4))):
        (tmp_path / label).mkdir()
        for number, shade in enumerate(names):
            Image.new("L", (8, 8), shade).save(tmp_path / label / f"{number}.png")
    data = load(
        DataConfig(train=str(tmp_path), test_fraction=0, group="image"), task=get_task("image-classification").columns
    )
    first = data.groups[0]
    assert (data.groups == first).tolist() == [True, False, True, True, False, False]
    assert len(set(data.groups.tolist())) == 4


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 12), min_size=30, max_size=80),
    st.sampled_from(["iid", "dirichlet", "pathological", "quantity"]),
    st.integers(0, 3),
)
def test_groups_stay_in_one_part_of_one_client(drawn: list[int], partitioner: str, seed: int) -> None:
    data = datasets.Dataset.from_dict(
        {"text": [str(at) for at in range(len(drawn))], "label": [at % 2 for at in drawn]}
    )
    how = PartitionConfig.model_validate({"partitioner": partitioner, "clients": 3, "min_examples": 1, "alpha": 5.0})
    groups = np.array(drawn, np.int64)
    try:
        parts = partition(data, how, seed, groups=groups)
    except FedspanError as error:  # few groups, or a draw that leaves a client without any
        if error.field.removeprefix("partition.") not in ("clients", "alpha", "min_examples", "classes_per_client"):
            raise
        return
    where = parts_of(parts)
    assert sorted(where) == list(range(len(drawn)))
    assert len({(group, where[row]) for row, group in enumerate(drawn)}) == len(set(drawn))
    assert all(len(client.train) for client in parts.clients)


def test_groups_of_a_column_and_rows_without_one(tmp_path: Path, refused: Refused) -> None:
    rows = [(f"text {at}", "ab"[at % 2], "p" if at < 3 else "", f"site {at % 2}") for at in range(8)]
    path = table(tmp_path / "t.csv", rows, "text", "label", "patient", "site")
    config = DataConfig(train=path, group="patient", test_fraction=0)
    data = load(config)
    assert len(set(data.groups[:3].tolist())) == 1
    assert len(set(data.groups.tolist())) == 6
    natural = PartitionConfig(partitioner="natural", column="site")
    words = ["1 groups (data.group) have rows of several values, such as 'site 0' and 'site 1'"]
    refused("partition.column", "site", words, lambda: partition(data.train, natural, 0, groups=data.groups))
    split = PartitionConfig(column="site", clients=2)
    refused("partition.column", "site", words, lambda: partition(data.train, split, 0, groups=data.groups))
    wrong = DataConfig(train=path, group="patinet", test_fraction=0)
    refused("data.group", "patinet", ["Did you mean 'patient'"], load, wrong)
    one = DataConfig(train=table(tmp_path / "u.csv", [(*row[:2], "p") for row in rows], "text", "label", "patient"))
    words = ["all rows are one group"]
    refused("data.group", "patient", words, load, one.model_copy(update={"group": "patient"}))


def test_a_label_can_be_a_group(tmp_path: Path) -> None:
    config = DataConfig(train=table(tmp_path / "t.csv", REPEATED, "text", "kind"), label="kind", group="kind")
    data = load(config.model_copy(update={"test_fraction": 0.0}))
    assert duplicates.encode_groups(data.train, config, "data").tolist() == data.groups.tolist()
    assert len(set(data.groups.tolist())) == 2


def test_parts_of_a_client_have_whole_groups_and_its_labels() -> None:
    groups = np.repeat(np.arange(40), 3)
    labels = np.repeat((np.arange(40) % 4 == 0).astype(np.int64), 3)
    data = datasets.Dataset.from_dict({"text": ["x"] * 120, "label": labels.tolist()})
    for seed in range(5):
        parts = partition(data, PartitionConfig(clients=1, validation=0.2, test=0.2), seed, groups=groups)
        (client,) = parts.clients
        for rows in (client.validation, client.test):
            assert len(rows) == 24
            assert np.bincount(labels[rows]).tolist() == [18, 6]
