"""Files in CoNLL form are read as sentences; what has another form is left to the other readers, or refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from fedspan import FedspanError
from fedspan.data.config import DataConfig
from fedspan.data.conll import has_sentences
from fedspan.data.loading import load
from fedspan.tasks.registry import get_task

TASK = get_task("token-classification").columns
assert TASK is not None
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
    with pytest.raises(FedspanError, match=r"line 4: 'three\\tDrug' is not a word with a tag"):
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


def test_empty_columns_at_the_end_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("Aspirin\tB-Drug\t\nhelps\tO\t\t\n\nRest\tO\n")
    data = load(DataConfig(train=str(path), test_fraction=0), task=TASK)
    assert data.train["tokens"][:] == [["Aspirin", "helps"], ["Rest"]]
    assert data.train["labels"][:] == [[1, 0], [0]]


@pytest.mark.parametrize("name", ["a.conll", "a.tsv", "a.txt"])
def test_tags_without_a_type_are_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text("helps\tO\nAspirin\tB\n\nRest\tO\n")
    with pytest.raises(FedspanError, match=r"line 2: 'Aspirin\\tB' is not a word with a tag.*names the type"):
        load(DataConfig(train=str(path), test_fraction=0), task=TASK)
