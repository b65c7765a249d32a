"""Rows of ids in one array are the rows."""

from __future__ import annotations

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedspan.errors import FedspanError
from fedspan.runs.setup import Prepared
from fedspan.tasks import causal, encoding
from fedspan.tasks.causal import CausalLM
from fedspan.tasks.classification import SequenceClassification
from fedspan.tasks.encoding import Ragged
from helpers import tiny_decoders

ROWS = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=6)


@given(st.lists(ROWS, max_size=4))
def test_rows_come_back(parts: list[list[list[int]]]) -> None:
    made, rows = Ragged.join([Ragged(part) for part in parts]), [row for part in parts for row in part]
    assert list(made) == rows
    assert made.lengths.tolist() == [len(row) for row in rows]
    assert made[1:-1] == rows[1:-1]
    with pytest.raises(IndexError):
        made[len(rows)]


def test_ids_beyond_32_bits_are_refused() -> None:
    with pytest.raises(OverflowError):
        Ragged([[2**31]])


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch, prepared: Prepared) -> None:
    task = SequenceClassification(prepared.task.tokenizer, prepared.labels, 5)
    texts = [f"lab{number % 8} " * (number % 4) + "word1" for number in range(9)]
    data = datasets.Dataset.from_dict({"text": texts, "text_pair": texts[::-1], "label": [0] * 9})
    whole = task.encode(data)
    monkeypatch.setattr(encoding, "_CHUNK", 4)
    parts = task.encode(data)
    assert {key: list(rows) for key, rows in parts.encodings.items()} == {
        key: list(rows) for key, rows in whole.encodings.items()
    }
    assert parts.lengths.tolist() == whole.lengths.tolist()


def test_chunks_of_prompts_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    task = CausalLM(tiny_decoders.tokenizer(pads=True), 6)
    texts = ["Q: " + "b0 " * number for number in range(1, 8)]
    data = datasets.Dataset.from_dict({"text": texts, "answer": [text[::-1] for text in texts]})
    whole = task.encode(data)
    monkeypatch.setattr(causal, "_CHUNK", 3)
    parts = task.encode(data)
    assert list(parts.ids) == list(whole.ids)
    assert parts.starts.tolist() == whole.starts.tolist()
    assert (parts.answers, parts.truncated_prompts, parts.truncated_answers) == (
        whole.answers, whole.truncated_prompts, whole.truncated_answers,
    )  # fmt: skip
    assert parts.truncated_prompts > 0
    strict = CausalLM(tiny_decoders.tokenizer(pads=True), 6, refuse_long=True)
    with pytest.raises(FedspanError, match="the answer of example 5 has 6 tokens"):
        strict.encode(datasets.Dataset.from_dict({"text": texts, "answer": ["c0 " * at for at in range(1, 8)]}))


def test_ids_take_no_more_bytes_than_they_need() -> None:
    rows = [[0] * 1000, [255], [70_000], [-100, 3]]
    made = Ragged.join([Ragged([row]) for row in rows])
    assert [made[at] for at in range(4)] == rows
    assert made.pad([1, 3], -1).tolist() == [[255, -1], [-100, 3]]
    assert Ragged([[0] * 1000])._ids.nbytes == 1000
