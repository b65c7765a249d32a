"""The sentences of reviews: what is left out of the published files, and what the shipped ones hold."""

import csv
from pathlib import Path

import pytest

from evidence.pages import corpus
from fedspan.data.builtin import find_corpus_file


def read_rows(split: str) -> list[dict[str, str]]:
    with find_corpus_file("builtin:review-sentences", split, "data.train").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_shipped_sentences_have_no_crude_word_and_occur_once() -> None:
    rows = [row for split in ("train", "test") for row in read_rows(split)]
    assert len({row["text"].lower() for row in rows}) == len(rows) > 2800
    assert {row["site"] for row in rows} == set(corpus.SITES.values())
    assert not [row["text"] for row in rows if corpus.CRUDE.search(row["text"])]


def test_crude_and_repeated_sentences_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, stem in enumerate(corpus.SITES):
        lines = [f"Sentence  {letter} of site {number}.\t{number % 2}" for letter in "abcde"]
        lines += ["What utter CRAP.\t0", "Good,\u2028really good.\t1", "good, really GOOD.\t1"]
        (tmp_path / f"{stem}_labelled.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    monkeypatch.setattr("fedspan.data.builtin.files", lambda package: tmp_path)
    (tmp_path / "corpus").mkdir()
    corpus.write_review_sentences(tmp_path)
    train, test = (read_rows(split) for split in ("train", "test"))
    assert (len(train), len(test)) == (13, 3)
    assert {(row["text"], row["label"], row["site"]) for row in [*train, *test]} == {
        ("Good, really good.", "positive", "phones"),
        *((f"Sentence {letter} of site 0.", "negative", "phones") for letter in "abcde"),
        *((f"Sentence {letter} of site 1.", "positive", "films") for letter in "abcde"),
        *((f"Sentence {letter} of site 2.", "negative", "restaurants") for letter in "abcde"),
    }
